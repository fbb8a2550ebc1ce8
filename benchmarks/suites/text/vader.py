"""Sentences that people rated for VADER: is a film review, tweet, product review or editorial positive?"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.suites.text.splits import Part, part_of
from merging.demo.llm.movie import CLASSES, CLEAR
from merging.demo.llm.texts import Text
from merging.demo.packages import Archive, unpacked

_INNER = "*/hutto_ICWSM_2014.tar.gz"


def movie(vader: Archive) -> Iterator[tuple[Text, Part]]:
    """Sentences of film reviews; sentences are held out."""
    return _rated(vader, "movieReviewSnippets")


def tweets(vader: Archive) -> Iterator[tuple[Text, Part]]:
    return _rated(vader, "tweets")


def amazon(vader: Archive) -> Iterator[tuple[Text, Part]]:
    """Sentences of product reviews."""
    return _rated(vader, "amazonReviewSnippets")


def editorials(vader: Archive) -> Iterator[tuple[Text, Part]]:
    """Sentences of a newspaper's editorials."""
    return _rated(vader, "nytEditorialSnippets")


def _rated(vader: Archive, file: str) -> Iterator[tuple[Text, Part]]:
    """Lines of number, mean rating and sentence; those that people were not sure about are left out."""
    (corpus,) = vader.matching(_INNER).values()
    (ratings,) = unpacked(corpus, f"*/{file}_GroundTruth.txt").values()
    for line in ratings.decode("utf-8", errors="replace").splitlines():
        fields = line.split("\t")
        if len(fields) == 3 and abs(float(fields[1])) > CLEAR:
            sentence = fields[2].strip()
            yield Text(sentence, CLASSES[float(fields[1]) > 0]), part_of(sentence)
