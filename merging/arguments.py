"""checked: what the functions that users call are given, looked at before anything is done with it.

Every argument that does not fit is told, all in one SpecError, as a wrong value in a spec is.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

from merging.errors import Problem, SpecError
from merging.registry import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

Check: TypeAlias = Callable[[str, Any], list[Problem]]
"""Where the value stands, and the value -> what is wrong with it."""


def checked(**checks: Check) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: SpecError for arguments that fail these checks, by their names, and for such as the function
    does not take."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = _given(function, signature, args, kwargs)
            problems = [
                problem
                for name, check in checks.items()
                if name in given
                for problem in check(name, given[name])
            ]
            if problems:
                raise SpecError(f"{_called(function)} cannot be called like this", problems=problems)
            return function(*args, **kwargs)

        return call

    return decorate


def kind(expected: str, fits: Callable[[Any], bool], remedy: str = "") -> Check:
    """The check that a value is of that kind."""

    def check(where: str, value: Any) -> list[Problem]:
        return [] if fits(value) else [Problem(where, f"found {found(value)}, expected {expected}", remedy)]

    return check


def optional(check: Check) -> Check:
    """The same, or None."""
    return lambda where, value: [] if value is None else check(where, value)


def one_of(*words: str) -> Check:
    """The check that a value is one of these texts."""
    expected = " or ".join(f'"{word}"' for word in words)

    def check(where: str, value: Any) -> list[Problem]:
        if isinstance(value, str) and value in words:
            return []
        remedy = did_you_mean(value, words) if isinstance(value, str) and len(words) > 1 else ""
        return [Problem(where, f"found {found(value)}, expected {expected}", remedy)]

    return check


def mapping_of(expected: str, example: str, inner: Check | None = None) -> Check:
    """The check that a value is a mapping from texts to what `inner` takes."""

    def check(where: str, value: Any) -> list[Problem]:
        from merging.spec.wording import join  # which itself needs the registries, and these this file

        if not _is_mapping(value):
            return [Problem(where, f"found {found(value)}, expected {expected}", f"Like {example}.")]
        problems = [
            Problem(where, f"found {found(key)} as a name, expected text")
            for key, _ in value.items()
            if not (isinstance(key, str) and key)
        ]
        if inner is not None:
            problems += [one for key, item in value.items() for one in inner(join(where, key), item)]
        return problems

    return check


def whole(*, at_least: int, below: int = 2**63) -> Check:
    """The check that a value is a whole number within these bounds."""
    limit = "" if below == 2**63 else f" and below {below}"
    return kind(
        f"a whole number of at least {at_least}{limit}",
        lambda value: not isinstance(value, bool) and _within(value, at_least, below),
    )


def found(value: object) -> str:
    """A value as a message to someone who writes Python calls it."""
    from merging.spec.wording import described

    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if type(value) in (int, float, str):
        return described(value)
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def is_place(value: object) -> bool:
    """Whether it names a file or folder."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return isinstance(value, str) and value.strip() != ""


NAME = kind("a name", lambda value: isinstance(value, str) and value.strip() != "")
FLAG = kind("True or False", lambda value: isinstance(value, bool))
PROGRESS = kind("a function of three arguments: stage, done, total", lambda value: _takes(value, "", 0, 1))
PLACE = kind("a path, as text or a Path", is_place)
TEXTS = kind(
    "a list of texts",
    lambda value: (
        isinstance(value, Collection)
        and not isinstance(value, str | bytes | Mapping)
        and all(isinstance(one, str) for one in value)
    ),
    'Like ["merge.scale=0.4"].',
)
SEED = whole(at_least=0)
DEVICE = kind("the name of a device, as text", lambda value: isinstance(value, str) and value != "")


def _is_mapping(value: Any) -> bool:
    """Also a ModuleDict, which is none by its class."""
    like_one = all(hasattr(value, name) for name in ("keys", "items", "__getitem__"))
    return isinstance(value, Mapping) or (like_one and not isinstance(value, type))


def _takes(value: Any, *arguments: object) -> bool:
    if not callable(value):
        return False
    try:
        inspect.signature(value).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a builtin that does not tell
        return True
    return True


def _within(value: Any, at_least: int, below: int) -> bool:
    try:
        return at_least <= value.__index__() < below
    except (AttributeError, TypeError):
        return False


def _given(
    function: Callable[..., Any],
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """What was given, by name; SpecError where the function takes no such thing, or lacks one."""
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        named = [name for name in signature.parameters if name not in ("self", "cls")]
        strange = [name for name in kwargs if name not in named]
        problems = [
            Problem(name, "there is no such argument", did_you_mean(name, named) if named else "")
            for name in strange
        ]
        takes = f"It takes {', '.join(named)}." if named else "It takes no arguments."
        if problems:
            raise SpecError(
                f"{_called(function)} cannot be called like this", problems=problems, remedy=takes
            ) from error
        raise SpecError(f"{_called(function)}: {error}", remedy=takes) from error


def _called(function: Callable[..., Any]) -> str:
    return f"{function.__qualname__.replace('.__init__', '')}()"
