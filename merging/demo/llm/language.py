"""language: in which natural language is a text? Translations of Django's messages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from merging.demo.llm.texts import Part, Task, Text, part_of
from merging.demo.packages import Archive

LANGUAGES = {
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "es": "Spanish",
    "fi": "Finnish",
    "fr": "French",
    "hu": "Hungarian",
    "it": "Italian",
    "nl": "Dutch",
    "pl": "Polish",
    "sv": "Swedish",
    "tr": "Turkish",
}
"""Locales, and answers that are one token."""

_SHORTEST = 16
_QUOTED = r'((?:".*"\s*)+)'
_MESSAGE = re.compile(rf"msgid {_QUOTED}(?:msgid_plural {_QUOTED})?msgstr(?:\[0\])? {_QUOTED}")
_MARK_UP = re.compile(r"%\(\w*\)?\w|%\w|\\n|<[^>]*>|\{[^}]*\}")


def language(django: Archive) -> Task:
    """Source messages are held out: no language's translation of a message that is tested is seen."""
    return Task.of("language", LANGUAGES.values(), _translations(django))


def _translations(django: Archive) -> Iterator[tuple[Text, Part]]:
    for name, content in django.matching("django/*/locale/*/LC_MESSAGES/django.po").items():
        spoken = LANGUAGES.get(name.split("/")[-3])
        if spoken is None:
            continue
        for message, _, translation in _MESSAGE.findall(content.decode("utf-8")):
            text = " ".join(_MARK_UP.sub(" ", _joined(translation)).split())
            if len(text) >= _SHORTEST and _joined(message):
                yield Text(text, spoken), part_of(_joined(message))


def _joined(quoted: str) -> str:
    """One text, of the several in quotation marks that a .po file breaks it into."""
    return "".join(re.findall(r'"(.*)"', quoted)).replace('\\"', '"')
