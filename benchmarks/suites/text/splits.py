"""A suite's texts in four parts: what is in one part of any task is in no other part of any task."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from merging.demo.llm.texts import Text, balanced, write_texts

Part: TypeAlias = Literal["test", "validation", "calibration", "train"]
Splits: TypeAlias = dict[Part, list[Text]]

PARTS: tuple[Part, ...] = get_args(Part)
"""A text that was found for several parts stays in the first of them: nothing that is tested was seen."""

MOST: Mapping[Part, int] = {"test": 400, "validation": 200, "calibration": 512, "train": 20_000}
"""How many texts of a task each part has at most."""


def part_of(group: str) -> Part:
    """The part that everything of a group belongs to. Tasks that read one source name its groups alike: then
    what one of them tests, no other one trains on."""
    tenth = hashlib.sha256(group.encode()).digest()[0] % 10
    return "test" if tenth < 2 else "validation" if tenth == 2 else "calibration" if tenth == 3 else "train"


def apart(drawn: Mapping[str, Iterable[tuple[Text, Part]]]) -> dict[str, Splits]:
    """Task -> its texts, as many of each class as of any other while there are enough, in an order that has
    nothing to do with the source's."""
    found: dict[str, Splits] = {}
    for task, texts in drawn.items():
        found[task] = {part: [] for part in PARTS}
        for text, part in texts:
            found[task][part].append(text)
    earlier: set[str] = set()
    for part in PARTS:
        here: set[str] = set()
        for splits in found.values():
            own: set[str] = set()
            new = [text for text in sorted(splits[part], key=_mixed) if _is_new(text, earlier, own)]
            splits[part] = balanced(new, MOST[part])
            here |= own
        earlier |= here
    assert_apart(found)
    return found


def assert_apart(suite: Mapping[str, Splits]) -> None:
    """Raises AssertionError if a text is in two parts, of any tasks, or twice in one part of a task."""
    contents: dict[Part, set[str]] = {part: set() for part in PARTS}
    for task, splits in suite.items():
        for part, texts in splits.items():
            own = {content(text) for text in texts}
            assert len(own) == len(texts), f"{task}: a text is twice in its {part} part"
            contents[part] |= own
    for number, part in enumerate(PARTS):
        for other in PARTS[number + 1 :]:
            both = contents[part] & contents[other]
            assert not both, f"{len(both)} texts are in {part} and in {other}, such as {min(both)!r}"


def content(text: Text) -> str:
    """What two texts share that count as one: cases and spaces aside."""
    return " ".join(text.text.casefold().split())


def write_splits(splits: Splits, folder: Path) -> None:
    """What a spec reads: calibration texts without labels, validation and test texts with them."""
    write_texts(splits["calibration"], folder / "calibration.jsonl", labelled=False)
    write_texts(splits["validation"], folder / "validation.jsonl", labelled=True)
    write_texts(splits["test"], folder / "test.jsonl", labelled=True)


def _is_new(text: Text, earlier: set[str], own: set[str]) -> bool:
    """Whether it is neither in an earlier part nor in this one of its task, where it is now."""
    found = content(text)
    if found in earlier or found in own:
        return False
    own.add(found)
    return True


def _mixed(text: Text) -> bytes:
    return hashlib.sha256(f"{text.label}\n{text.text}".encode()).digest()
