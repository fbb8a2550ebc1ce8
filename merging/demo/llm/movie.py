"""movie: is a sentence of a film review positive? Sentences that people rated for VADER."""

from __future__ import annotations

from collections.abc import Iterator

from merging.demo.llm.texts import Part, Task, Text, part_of
from merging.demo.packages import Archive, unpacked

CLASSES = ("negative", "positive")
CLEAR = 0.8
"""Least mean rating, from -4 to 4, of what counts as either."""

_INNER, _RATINGS = "*/hutto_ICWSM_2014.tar.gz", "*/movieReviewSnippets_GroundTruth.txt"


def movie(vader: Archive) -> Task:
    """Sentences are held out."""
    (corpus,) = vader.matching(_INNER).values()
    (ratings,) = unpacked(corpus, _RATINGS).values()
    return Task.of("movie", CLASSES, _rated(ratings.decode("utf-8", errors="replace")))


def _rated(ratings: str) -> Iterator[tuple[Text, Part]]:
    """Lines of number, mean rating and sentence."""
    for line in ratings.splitlines():
        _, rating, sentence = line.split("\t")
        if abs(float(rating)) > CLEAR:
            yield Text(sentence.strip(), CLASSES[float(rating) > 0]), part_of(sentence)
