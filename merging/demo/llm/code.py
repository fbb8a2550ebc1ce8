"""code: in which language are three lines of source code? Files on which Pygments tests its lexers."""

from __future__ import annotations

from collections.abc import Iterator

from merging.demo.llm.texts import Part, Task, Text
from merging.demo.packages import Archive

LANGUAGES = {
    "c": "C",
    "java": "Java",
    "make": "make",
    "delphi": "Pascal",
    "perl": "Perl",
    "php": "PHP",
    "rb": "Ruby",
    "scheme": "Scheme",
    "bash": "shell",
    "xml": "XML",
}
"""Folders of examples, and answers that are one token."""

LINES = 3
_SHORTEST = 9
_TRAIN, _CALIBRATION = 0.65, 0.75


def code(pygments: Archive) -> Task:
    """The last quarter of each file is held out, and the tenth before it calibrates: most languages have one
    large file, so that whole files cannot be held out."""
    return Task.of("code", LANGUAGES.values(), _snippets(pygments))


def _snippets(pygments: Archive) -> Iterator[tuple[Text, Part]]:
    for name, content in pygments.matching("*/tests/examplefiles/*/*").items():
        language = LANGUAGES.get(name.split("/")[-2])
        if language is None or name.endswith(".output"):
            continue
        stripped = [line.strip() for line in content.decode("utf-8", errors="replace").splitlines()]
        lines = [line for line in stripped if len(line) >= _SHORTEST]
        count = len(lines) // LINES
        for number in range(count):
            start = LINES * number
            yield Text("\n".join(lines[start : start + LINES]), language), _part(number / count)


def _part(share: float) -> Part:
    """By how much of its file lies before a snippet."""
    return "train" if share < _TRAIN else "calibration" if share < _CALIBRATION else "test"
