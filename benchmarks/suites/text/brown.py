"""genre and tense: two tasks on the Brown corpus. Whole documents are held out, the same ones in both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.suites.text.splits import Part, part_of
from merging.demo.llm.texts import Text
from merging.demo.packages import Archive

GENRES = {
    "a": "news",
    "b": "news",
    "c": "news",
    "d": "religion",
    "h": "government",
    "j": "science",
    "k": "fiction",
    "l": "fiction",
    "m": "fiction",
    "n": "fiction",
    "p": "fiction",
}
"""Letters of Brown's categories."""

TENSES = {
    "past": {"vbd", "bed", "bedz", "hvd", "dod"},
    "present": {"vbz", "bez", "bem", "ber", "hvz", "doz"},
}
"""Brown's tags of verbs."""

MOST_CHARACTERS = 260
_FEWEST_WORDS = 5


class _Word(NamedTuple):
    word: str
    tag: str


def genre(brown: Archive) -> Iterator[tuple[Text, Part]]:
    """Two sentences in a row: from what kind of document?"""
    for document, sentences in _documents(brown):
        if document[1] in GENRES:
            for first, second in zip(sentences[::2], sentences[1::2], strict=False):
                yield Text(_shown([*first, *second]), GENRES[document[1]]), part_of(f"brown {document}")


def tense(brown: Archive) -> Iterator[tuple[Text, Part]]:
    """Sentences all of whose verbs with a tense have the same one: which?"""
    for document, sentences in _documents(brown):
        for words in sentences:
            # "vbd-hl" is one in a headline, "bez*" has a "not" and "ppss+ber" a pronoun in it.
            tags = {tag for word in words for tag in word.tag.split("-")[0].replace("*", "").split("+")}
            found = [label for label, its in TENSES.items() if tags & its]
            if len(found) == 1:
                yield Text(_shown(words), found[0]), part_of(f"brown {document}")


def _documents(brown: Archive) -> Iterator[tuple[str, list[list[_Word]]]]:
    """Names such as "ca01", and sentences."""
    for name, content in brown.matching("package/c[a-r][0-9][0-9]").items():
        lines = [line.split() for line in content.decode("latin-1").splitlines()]
        sentences = [[_Word(*tagged.rsplit("/", 1)) for tagged in line] for line in lines]
        yield name.split("/")[-1], [words for words in sentences if len(words) >= _FEWEST_WORDS]


def _shown(words: Sequence[_Word]) -> str:
    return " ".join(word.word for word in words)[:MOST_CHARACTERS]
