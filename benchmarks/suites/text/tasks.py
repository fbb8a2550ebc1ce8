"""The text tasks by name: their classes, the word that answers each, and where their texts come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.suites.text import brown, fortunes, from_demo, packages, spam, vader, wordnet
from benchmarks.suites.text.splits import Part
from merging.demo.llm import code, language, movie
from merging.demo.llm.texts import Text
from merging.demo.packages import Archive, Package


@dataclass(frozen=True)
class TextTask:
    """Classes are answered by their own names. `read` gives labelled texts from the package's archive."""

    name: str
    classes: tuple[str, ...]
    package: Package
    read: Callable[[Archive], Iterable[tuple[Text, Part]]]

    def texts(self, archives: Mapping[str, Archive]) -> Iterator[tuple[Text, Part]]:
        yield from self.read(archives[self.package.name])


def _task(
    name: str,
    classes: Iterable[str],
    package: Package,
    read: Callable[[Archive], Iterable[tuple[Text, Part]]],
) -> TextTask:
    return TextTask(name, tuple(sorted(set(classes))), package, read)


MOVIE = _task("movie", movie.CLASSES, packages.VADER, vader.movie)
SPAM = _task("spam", spam.CLASSES, packages.SPAM, spam.spam)
SUPERSENSE = _task("supersense", wordnet.SUPERSENSES.values(), packages.WORDNET, wordnet.supersense)
POS = _task("pos", wordnet.PARTS_OF_SPEECH.values(), packages.WORDNET, wordnet.pos)
GENRE = _task("genre", brown.GENRES.values(), packages.BROWN, brown.genre)
TENSE = _task("tense", brown.TENSES, packages.BROWN, brown.tense)
FORTUNE = _task("fortune", fortunes.TOPICS.values(), packages.FORTUNES, fortunes.fortune)
CODE = _task("code", code.LANGUAGES.values(), packages.PYGMENTS, from_demo.code)

TWEETS = _task("tweets", movie.CLASSES, packages.VADER, vader.tweets)
AMAZON = _task("amazon", movie.CLASSES, packages.VADER, vader.amazon)
EDITORIALS = _task("editorials", movie.CLASSES, packages.VADER, vader.editorials)
LANGUAGE = _task("language", language.LANGUAGES.values(), packages.DJANGO, from_demo.language)
