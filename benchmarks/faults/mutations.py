"""Changes that make good input bad: of JSON values, of text, of bytes. All drawn from one random.Random."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Place = tuple[Any, ...]

TEXTS = (
    "",
    " ",
    "a",
    "..",
    "../..",
    "./x",
    "~",
    "~nobody/x",
    "/",
    "/nowhere/at/all",
    "a/b",
    "org/name",
    "C:\\x",
    "auto",
    "cpu",
    "cuda:99",
    "meta",
    "base",
    "float99",
    "5GB",
    "-1GB",
    "1e400GB",
    "NaN",
    "null",
    "true",
    "ties",
    "regmean",
    "featcal",
    "checkpoint",
    "digits",
    "a\nb",
    "\t",
    "\x00",
    "\x7f",
    "\ud800",
    "\u202e\u0645",
    "\u0130\u0131",
    "\U0001f986",
    "e\u0301" * 40,
    "x" * 300,
    "y" * 20_000,
    "<script>alert(1)</script>",
    "%s%n{0}{x.__class__}",
    "'; --",
    "(a+)+$",
    "[",
)
NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    0.5,
    -0.0,
    1e-320,
    1.5,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    2**31,
    2**63,
    -(2**63) - 1,
    10**30,
    10**400,
)


def value(chance: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can say, and NaN."""
    kind = chance.random()
    if kind < 0.3:
        return chance.choice(TEXTS)
    if kind < 0.6:
        return chance.choice(NUMBERS)
    if kind < 0.7:
        return chance.choice((None, True, False))
    if kind < 0.75:
        return nested(chance.choice((3, 30, 60, 150)), as_list=chance.random() < 0.5)
    if depth > 2:
        return []
    if kind < 0.87:
        return [value(chance, depth + 1) for _ in range(chance.randint(0, 3))]
    return {chance.choice(TEXTS): value(chance, depth + 1) for _ in range(chance.randint(0, 3))}


def nested(depth: int, *, as_list: bool) -> Any:
    """Lists or objects in each other."""
    found: Any = 0
    for _ in range(depth):
        found = [found] if as_list else {"a": found}
    return found


def mutated(original: Any, chance: random.Random, keys: Sequence[str] = (), most: int = 3) -> Any:
    """A copy with one to `most` changes: values replaced, removed, added, moved, wrapped, renamed.

    `keys`: names that mean something at some place, to be used for additions and new names.
    """
    found = copy.deepcopy(original)
    for _ in range(chance.randint(1, most)):
        places = [place for place in _places(found) if place]
        if not places:
            return value(chance)
        _change(found, chance.choice(places), places, chance, keys)
    return found


def text_of(content: Any) -> str:
    """JSON, with NaN and halves of characters as escapes."""
    return json.dumps(content)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, removed, doubled or put in; or the end cut off."""
    found = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        start = chance.randint(0, max(0, len(found) - 1))
        stop = min(len(found), start + chance.randint(1, 12))
        change = chance.choice(("flip", "cut", "double", "insert", "nest", "end"))
        if change == "flip" and found:
            found[start] ^= 1 << chance.randint(0, 7)
        elif change == "cut":
            del found[start:stop]
        elif change == "double":
            found[start:start] = found[start:stop]
        elif change == "insert":
            found[start:start] = bytes(chance.randint(0, 255) for _ in range(chance.randint(1, 8)))
        elif change == "nest":
            found[start:start] = chance.choice((b"[", b'{"a":', b"- ")) * chance.choice((10, 2000, 100_000))
        elif chance.random() < 0.3:
            del found[start:]
    return bytes(found)


def _places(content: Any, place: Place = ()) -> Iterator[Place]:
    if len(place) > 12:
        return
    yield place
    items = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content[:20])
        if isinstance(content, list)
        else ()
    )
    for key, item in items:
        yield from _places(item, (*place, key))


def _change(
    content: Any, place: Place, places: Sequence[Place], chance: random.Random, keys: Sequence[str]
) -> None:
    target, key = _at(content, place[:-1]), place[-1]
    names: Sequence[str] = [*keys, *TEXTS] if keys and chance.random() < 0.7 else TEXTS
    if chance.random() < 0.4:  # a value that fits the place in kind, from another one or nearby
        alike = [_at(content, other) for other in places]
        target[key] = copy.deepcopy(
            chance.choice([one for one in alike if type(one) is type(target[key])] or [target[key]])
        )
        if type(target[key]) in (int, float):
            target[key] = type(target[key])(target[key] * chance.choice((0, 0.5, 1, 2, 3, 100)))
        return
    changes: list[Callable[[], None]] = [
        lambda: target.__setitem__(key, value(chance)),
        lambda: target.__setitem__(key, [target[key]]),
        lambda: target.__setitem__(key, {chance.choice(names): target[key]}),
        lambda: target.__setitem__(key, str(target[key])),
        lambda: target.__setitem__(key, copy.deepcopy(_at(content, chance.choice(places)))),
        lambda: target.__delitem__(key),
    ]
    if isinstance(target, dict):
        changes += [
            lambda: target.__setitem__(chance.choice(names), value(chance)),
            lambda: target.__setitem__(chance.choice(names), target.pop(key)),
            lambda: target.__setitem__(_misspelt(str(key), chance), target.pop(key)),
        ]
    if isinstance(target[key], str):
        changes.append(lambda: target.__setitem__(key, _misspelt(target[key], chance)))
    if isinstance(target[key], int | float):
        changes += [lambda: target.__setitem__(key, chance.choice(NUMBERS))] * 2
    chance.choice(changes)()


def _at(content: Any, place: Place) -> Any:
    for key in place:
        content = content[key]
    return content


def _misspelt(text: str, chance: random.Random) -> str:
    at = chance.randint(0, len(text))
    return chance.choice((text[:at] + text[at + 1 :], text[:at] + "x" + text[at:], text.upper(), text + " "))
