"""code and language: tasks of the demo's suite `llm`, their texts in four parts instead of three."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.suites.text.splits import Part, part_of
from merging.demo.llm import code as demo_code
from merging.demo.llm import language as demo_language
from merging.demo.llm.texts import Task, Text
from merging.demo.packages import Archive


def code(pygments: Archive) -> Iterator[tuple[Text, Part]]:
    """The last quarter of each file is held out for the test, the tenth before it for the rest."""
    return _in_four(demo_code.code(pygments))


def language(django: Archive) -> Iterator[tuple[Text, Part]]:
    """Messages are held out with all their translations."""
    return _in_four(demo_language.language(django))


def _in_four(task: Task) -> Iterator[tuple[Text, Part]]:
    """The demo's calibration part becomes two: three of ten of its texts are for validation."""
    for text in task.train:
        yield text, "train"
    for text in task.test:
        yield text, "test"
    for text in task.calibration:
        yield text, "calibration" if part_of(text.text) in ("train", "calibration") else "validation"
