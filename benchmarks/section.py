"""A section of the results page: what was run, where, and the table that came of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAGE = "docs/benchmarks.md"
FAULTS_PAGE = "docs/reliability.md"
_MEASURED = "## Measured"  # the last part of that page

_HEAD = """# Benchmarks

Every section is written by the command that stands in it ([how](../benchmarks/README.md)), and says on what
machine, with which versions and under what load. Contenders of one table ran in turn (A B C A B C). Numbers
are medians; those under "times" are medians of the ratios within a round.
"""


@dataclass(frozen=True)
class Found:
    """What a table learned."""

    title: str
    body: Sequence[str]  # Markdown, a paragraph or a table each
    facts: Sequence[str] = ()  # what else took part: versions of peers, rates
    faults: Sequence[str] = ()  # what must not be, a line each


@dataclass(frozen=True)
class Section:
    """One table of the page, under a heading of its own."""

    title: str
    command: str
    facts: Sequence[str]  # machine, versions, load
    body: Sequence[str] = field(default_factory=tuple)  # Markdown, a paragraph or a table each

    def markdown(self) -> str:
        parts = [f"## {self.title}", f"```sh\n{self.command}\n```", "  \n".join(self.facts), *self.body]
        return "\n\n".join(parts) + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; all columns but the first flush right."""
    marks = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, marks, *rows))


def write_section(page: Path, section: Section) -> None:
    """Put the section in the place of the one of the same title, else at the end."""
    text = page.read_text(encoding="utf-8") if page.exists() else _HEAD
    before, *sections = re.split(r"(?m)^(?=## )", text)
    new = section.markdown()
    titles = [one.split("\n", 1)[0] for one in sections]
    if f"## {section.title}" in titles:
        sections[titles.index(f"## {section.title}")] = new
    else:
        sections.append(new)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(part.rstrip("\n") + "\n" for part in (before, *sections)), encoding="utf-8")


def write_part(page: Path, section: Section) -> None:
    """The same under the page's last heading, "Measured", one level deeper."""
    text = page.read_text(encoding="utf-8") if page.exists() else "# Reliability\n"
    before, _, measured = text.partition(f"\n{_MEASURED}\n")
    about, *parts = re.split(r"(?m)^(?=### )", measured)
    new = "#" + section.markdown()
    titles = [one.split("\n", 1)[0] for one in parts]
    if f"### {section.title}" in titles:
        parts[titles.index(f"### {section.title}")] = new
    else:
        parts.append(new)
    whole = (f"{before}\n{_MEASURED}\n{about}", *parts)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(part.rstrip("\n") + "\n" for part in whole), encoding="utf-8")
