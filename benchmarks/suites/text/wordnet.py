"""supersense and pos: of what kind, and of which part of speech, is the word that a gloss explains?"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.suites.text.splits import Part, part_of
from merging.demo.llm.texts import Text
from merging.demo.packages import Archive

PARTS_OF_SPEECH = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
"""Files, and classes."""

SUPERSENSES = {
    "04": "act",
    "05": "animal",
    "06": "artifact",
    "08": "body",
    "09": "cognition",
    "10": "communication",
    "13": "food",
    "15": "location",
    "18": "person",
    "20": "plant",
    "26": "state",
    "27": "substance",
}
"""Numbers of WordNet's files of nouns, and classes."""

MOST_CHARACTERS = 200
_SHORTEST = 8


def supersense(wordnet: Archive) -> Iterator[tuple[Text, Part]]:
    """Glosses of nouns; synsets are held out, the same ones as in `pos`."""
    for file, synset, number, gloss in _glosses(wordnet):
        if file == "noun" and number in SUPERSENSES:
            yield Text(gloss, SUPERSENSES[number]), part_of(f"wordnet {file} {synset}")


def pos(wordnet: Archive) -> Iterator[tuple[Text, Part]]:
    """Glosses of all words."""
    for file, synset, _, gloss in _glosses(wordnet):
        yield Text(gloss, PARTS_OF_SPEECH[file]), part_of(f"wordnet {file} {synset}")


def _glosses(wordnet: Archive) -> Iterator[tuple[str, str, str, str]]:
    """File, synset, number of the lexicographer's file, and gloss without its examples."""
    for file in PARTS_OF_SPEECH:
        (content,) = wordnet.matching(f"usr/share/wordnet/data.{file}").values()
        for line in content.decode("utf-8").splitlines():
            if line.startswith(" "):  # the licence
                continue
            facts, gloss = line.split("|", 1)
            synset, number, *_ = facts.split()
            shown = gloss.strip().split('; "')[0][:MOST_CHARACTERS]
            if len(shown) >= _SHORTEST:
                yield file, synset, number, shown
