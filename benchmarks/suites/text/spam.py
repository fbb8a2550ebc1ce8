"""spam: is a mail one that nobody asked for? The corpus of SpamAssassin."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from email import message_from_bytes, policy
from email.message import Message

from benchmarks.suites.text.splits import Part, part_of
from merging.demo.llm.texts import Text
from merging.demo.packages import Archive

CLASSES = ("ham", "spam")
MOST_CHARACTERS = 300

_FOLDERS = {"easy-ham-1": "ham", "easy-ham-2": "ham", "hard-ham-1": "ham", "spam-1": "spam", "spam-2": "spam"}
_TAG, _REPLY = re.compile(r"<[^>]*>"), re.compile(r"re:|fwd?:|\W", re.IGNORECASE)


def spam(spam_assassin: Archive) -> Iterator[tuple[Text, Part]]:
    """Subject and beginning of the first part of each mail; threads of one subject are held out whole."""
    for name, content in spam_assassin.matching("package/data/*/*.txt").items():
        mail = message_from_bytes(content, policy=policy.compat32)
        subject = str(mail.get("Subject", ""))
        text = html.unescape(_TAG.sub(" ", f"{subject} . {_body(mail)}"))
        shown = " ".join(text.split())[:MOST_CHARACTERS]
        thread = _REPLY.sub("", subject).casefold()
        yield Text(shown, _FOLDERS[name.split("/")[-2]]), part_of(f"mail {thread or shown}")


def _body(mail: Message) -> str:
    while mail.is_multipart():
        mail = mail.get_payload()[0]  # type: ignore[index, assignment]
    content = mail.get_payload(decode=True)
    return content.decode("latin-1") if isinstance(content, bytes) else ""
