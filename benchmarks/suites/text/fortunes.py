"""fortune: what is a quotation about? The files of the program `fortune`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.suites.text.splits import Part, part_of
from merging.demo.llm.texts import Text
from merging.demo.packages import Archive

TOPICS = {
    "art": "art",
    "computers": "computers",
    "education": "education",
    "food": "food",
    "law": "law",
    "men-women": "romance",
    "people": "people",
    "politics": "politics",
    "science": "science",
    "songs-poems": "poetry",
    "sports": "sports",
    "work": "work",
}
"""Files, and classes."""

MOST_CHARACTERS = 280
_SHORTEST = 30


def fortune(fortunes: Archive) -> Iterator[tuple[Text, Part]]:
    """Quotations are held out."""
    for file, topic in TOPICS.items():
        (content,) = fortunes.matching(f"usr/share/games/fortunes/{file}").values()
        for quotation in content.decode("utf-8", errors="replace").split("\n%\n"):
            shown = " ".join(quotation.split())[:MOST_CHARACTERS]
            if len(shown) >= _SHORTEST:
                yield Text(shown, topic), part_of(f"fortune {shown}")
