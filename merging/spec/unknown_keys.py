"""What was probably meant by an unknown key: another spelling, another level, the paper's symbol."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from merging.errors import Problem
from merging.registry import nearest
from merging.spec.wording import join


class UnknownKey(NamedTuple):
    """A key found at the place `where`, with its value."""

    where: str
    key: str
    value: object


class Places:
    """Which keys are valid at which place of this spec, with their descriptions."""

    def __init__(self) -> None:
        self._keys: dict[str, dict[str, str]] = {}

    def add(self, where: str, keys: Mapping[str, str]) -> None:
        self._keys[where] = {**self._keys.get(where, {}), **keys}

    def explain(self, unknown: UnknownKey) -> Problem:
        return Problem(join(unknown.where, unknown.key), "unknown key", self._remedy(unknown))

    def _remedy(self, unknown: UnknownKey) -> str:
        where, key, value = unknown
        here = self._keys.get(where, {})
        levels = [level for level in self._others(where) if key in self._keys[level]]
        inner = [name for name in value if name in here] if isinstance(value, Mapping) else []
        if inner and not levels:
            return f'write {_quoted(inner)} directly in {_level(where)}, without "{key}"'
        remarks = []
        if guess := nearest(key, here) or _same_part(key, here) or _same_symbol(key, here):
            remarks.append(f'did you mean "{guess}"?')
        if levels:
            remarks.append(f'"{key}" is a key of {_level(levels[0])}')
        if remarks:
            return "; ".join(remarks)
        for level in self._others(where):
            if guess := nearest(key, self._keys[level]) or _same_part(key, self._keys[level]):
                return f'did you mean "{guess}", a key of {_level(level)}?'
        return f"valid here: {', '.join(here)}" if here else "nothing may be given here"

    def _others(self, where: str) -> list[str]:
        """The other places: first those that enclose this one, then those in it, then the rest."""

        def distance(level: str) -> tuple[int, int]:
            if _contains(level, where):
                return 0, -len(level)
            return (1, len(level)) if _contains(where, level) else (2, 0)

        return sorted((level for level in self._keys if level != where), key=distance)


def _contains(outer: str, inner: str) -> bool:
    return outer == "" or inner.startswith(f"{outer}.")


def _level(where: str) -> str:
    return f'"{where}"' if where else "the top level"


def _quoted(words: Iterable[str]) -> str:
    return ", ".join(f'"{word}"' for word in words)


def _same_part(key: str, keys: Iterable[str]) -> str | None:
    """`seed` for `random_seed`, `density` for `topDensity`."""
    parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+", key)}
    return next((candidate for candidate in keys if candidate.lower() in parts), None)


def _same_symbol(key: str, keys: Mapping[str, str]) -> str | None:
    """The key whose description has a word like this one: `ridge` for `lamda`, whose symbol is lambda."""
    words = {
        word.lower(): candidate
        for candidate, about in keys.items()
        for word in re.findall(r"[^\W\d_]{3,}", about)
    }
    greek = {"λ": "lambda", "α": "alpha", "ρ": "rho", "β": "beta", "γ": "gamma", "ε": "epsilon"}
    words |= {
        name: candidate
        for candidate, about in keys.items()
        for letter, name in greek.items()
        if letter in about
    }
    guess = nearest(key, words, cutoff=0.8)
    return words[guess] if guess else None
