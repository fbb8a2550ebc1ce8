"""What a task of this suite is: labelled texts in three parts that share no text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

Part: TypeAlias = Literal["train", "calibration", "test"]

PROMPT = "{text}\nAnswer:"
MAX_LENGTH = 64
"""Tokens of a prompt: most texts are shorter, and attention stays cheap."""


class Text(NamedTuple):
    text: str
    label: str


@dataclass(frozen=True)
class Task:
    """`answers`: class -> the word that follows the prompt, a space before it."""

    name: str
    answers: Mapping[str, str]
    train: tuple[Text, ...]
    calibration: tuple[Text, ...]
    test: tuple[Text, ...]

    @classmethod
    def of(cls, name: str, classes: Iterable[str], drawn: Iterable[tuple[Text, Part]]) -> Task:
        """A text that was found for several parts, or twice, counts once: test before calibration before
        training, so that nothing that is tested was seen."""
        found: dict[Part, list[Text]] = {"test": [], "calibration": [], "train": []}
        for text, part in drawn:
            found[part].append(text)
        seen: set[str] = set()
        for part, texts in found.items():
            found[part] = [text for text in sorted(texts, key=_mixed) if _is_new(text, seen)]
        parts = {part: tuple(texts) for part, texts in found.items()}
        return cls(name, answers_of(classes), parts["train"], parts["calibration"], parts["test"])


def answers_of(classes: Iterable[str]) -> dict[str, str]:
    """A class is answered by its own name."""
    return {label: f" {label}" for label in sorted(classes)}


def part_of(group: str) -> Part:
    """The part that everything of a group belongs to: seven of ten train, one calibrates, two test."""
    place = _digest(group)[0] % 10
    return "test" if place < 2 else "calibration" if place == 2 else "train"


def balanced(texts: Sequence[Text], count: int) -> list[Text]:
    """Round by round one of each class that has any left, until there are `count`, or no more."""
    by_class = {label: [text for text in texts if text.label == label] for label in _labels(texts)}
    longest = max(map(len, by_class.values()), default=0)
    rounds = (
        of_class[turn] for turn in range(longest) for of_class in by_class.values() if turn < len(of_class)
    )
    return [text for text, _ in zip(rounds, range(count), strict=False)]


def write_texts(texts: Iterable[Text], path: Path, *, labelled: bool) -> None:
    """JSON lines with `text`, and with `label` where they are labelled."""
    rows = ({"text": text, "label": label} if labelled else {"text": text} for text, label in texts)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    path.write_text(lines, encoding="utf-8")


def read_texts(path: Path) -> list[Text]:
    """What `write_texts` wrote, labelled."""
    return [Text(**json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _labels(texts: Iterable[Text]) -> list[str]:
    return sorted({text.label for text in texts})


def _is_new(text: Text, seen: set[str]) -> bool:
    """Whether no text like it was seen, cases and spaces aside; it now is."""
    content = " ".join(text.text.casefold().split())
    known = content in seen
    seen.add(content)
    return not known


def _mixed(text: Text) -> bytes:
    """Sorts in an order that has nothing to do with where texts came from."""
    return _digest(f"{text.label}\n{text.text}")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
