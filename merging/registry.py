"""Names to classes: decorators, entry points, and the nearest valid name when one is misspelt."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from merging.errors import SpecError

T = TypeVar("T")
C = TypeVar("C")


def nearest(word: str, words: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The one of `words` that is most like `word`, if any is like it by at least `cutoff` of 1."""
    by_plain = {candidate.lower().replace("-", "_"): candidate for candidate in words}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), by_plain, n=1, cutoff=cutoff)
    return by_plain[found[0]] if found else None


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """A ready remark: `did you mean "x"?`, or the list of what there is."""
    words = sorted(words)
    guess = nearest(word, words)
    return f'did you mean "{guess}"?' if guess else f"valid: {', '.join(words)}"


class Registry(Generic[T]):
    """Built-in classes are loaded when first asked for; others come by decorator or entry point."""

    def __init__(self, kind: str, group: str, builtin: Mapping[str, str], parent: type = object) -> None:
        """`parent`: what all classes must derive from."""
        self.kind, self.group, self._parent = kind, group, parent
        self._paths = dict(builtin)
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[C]], type[C]]:
        """Decorator: make the class usable by `name` at once. A built-in name cannot be taken over.

        SpecError for a name that is taken or no text, and for what is no such class or lacks methods."""
        if not isinstance(name, str) or not name.strip():
            raise SpecError(
                f"a {self.kind} needs a name: found {_found(name)}, expected text",
                remedy=f'Like @merging.{self.kind}("my_own") above the class.',
            )

        def add(cls: type[C]) -> type[C]:
            if not isinstance(cls, type):
                raise SpecError(
                    f'{self.kind} "{name}": found {_found(cls)}, expected a class',
                    remedy=f"Derive one from {self._parent.__name__}.",
                )
            if lacking := sorted(getattr(cls, "__abstractmethods__", ())):
                raise SpecError(
                    f'{self.kind} "{name}", {cls.__qualname__}, lacks {", ".join(lacking)}',
                    remedy="Define what its base class declares abstract.",
                )
            path = f"{cls.__module__}:{cls.__qualname__}"
            taken = self._paths.get(name)
            known = self._classes.get(name)
            if (taken and taken != path) or (
                known is not None and f"{known.__module__}:{known.__qualname__}" != path
            ):
                raise SpecError(
                    f'{self.kind} "{name}" is already defined by {taken or known}',
                    remedy="Give the new class another name.",
                )
            if not issubclass(cls, self._parent):
                raise SpecError(
                    f'{self.kind} "{name}": the class {cls.__qualname__} does not derive from '
                    f"{self._parent.__name__}",
                    remedy=f"Derive it from merging.{self._parent.__name__}, or a class below that.",
                )
            cls.name = name  # type: ignore[attr-defined]
            self._classes[name] = cls  # type: ignore[assignment]
            return cls

        return add

    def names(self) -> tuple[str, ...]:
        """All names, built-in ones first, in the order in which they are listed."""
        found = [entry.name for entry in entry_points(group=self.group)]
        return tuple(dict.fromkeys([*self._paths, *self._classes, *found]))

    def get(self, name: str) -> type[T]:
        """The class of that name. Raises SpecError with the nearest valid name."""
        if not isinstance(name, str):
            raise SpecError(f"the name of a {self.kind} is text: found {_found(name)}")
        if name not in self._classes:
            self._load(name)
        return self._classes[name]

    def _load(self, name: str) -> None:
        if name in self._paths:
            module, _, attribute = self._paths[name].partition(":")
            self.register(name)(getattr(importlib.import_module(module), attribute))
            return
        for entry in entry_points(group=self.group):
            if entry.name == name:
                self.register(name)(entry.load())
                return
        raise SpecError(f'unknown {self.kind} "{name}"', remedy=did_you_mean(name, self.names()))


def _found(value: object) -> str:
    from merging.arguments import found  # which needs this file

    return found(value)
