"""Patterns of module names in an adapter's config, by PEFT's rule; matching them always ends."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from merging.errors import CheckpointError
from merging.spec.wording import shortened

_LONGEST = 500  # characters of a pattern
_MOST = 100_000  # patterns
_ESCAPED = re.compile(r"\\([^\w\s])")
_MORE = re.compile(r"[\\^$.*+?{}\[\]|()\n]")  # what makes a pattern more than a name
_REPEATS = 3  # "*", "+" or "{" in one pattern
_WAYS = 10**8  # in which one name may be tried, a matter of seconds
_SECONDS = 60.0  # of computing, for all names of an adapter
_TYPICAL = "model.layers.10.self_attn.q_proj"
_REMEDY = "Name the modules in full instead, as they are named in the adapter's tensors."


class ModulePatterns:
    """Values by pattern, as `rank_pattern` and `alpha_pattern` hold them."""

    def __init__(self, values: Mapping[str, Any], field: str) -> None:
        """Raises CheckpointError, naming the field, for a pattern that cannot be read or matched in time."""
        self._values, self._field = list(values.values()), field
        self._exact: dict[tuple[str, bool], int] = {}  # the name, and whether nothing may come before it
        self._dotted: dict[int, list[tuple[int, re.Pattern[str]]]] = defaultdict(list)  # by their length
        self._free: list[tuple[int, str, re.Pattern[str]]] = []
        self._known: dict[str, int | None] = {}
        self._seconds = 0.0
        if len(values) > _MOST:
            raise CheckpointError(
                f"{field} has {len(values)} patterns, expected at most {_MOST}", remedy=_REMEDY
            )
        for index, pattern in enumerate(values):
            self._add(index, pattern)

    def value(self, module: str, default: Any) -> Any:
        """Of the first pattern that matches the name's end, from a dot on. Raises CheckpointError where
        matching takes too long."""
        if module not in self._known:
            start = time.thread_time()
            self._known[module] = self._first(module, start - self._seconds)
            self._seconds += time.thread_time() - start
        found = self._known[module]
        return default if found is None else self._values[found]

    def _add(self, index: int, pattern: str) -> None:
        if len(pattern) > _LONGEST:
            what = f'the pattern "{shortened(pattern)}" has {len(pattern)} characters'
            raise CheckpointError(f"{self._field}: {what}, expected at most {_LONGEST}", remedy=_REMEDY)
        name = pattern.removeprefix("^")
        if not _MORE.search(_ESCAPED.sub("", name)):
            self._exact.setdefault((_ESCAPED.sub(r"\1", name), name != pattern), index)
            return
        length = _length(pattern)
        try:
            if length is not None:
                self._dotted[length].append((index, re.compile(pattern)))
                return
            re.compile(pattern)
            whole = re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, OverflowError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            what = f'a pattern cannot be read: "{shortened(pattern)}": {why}'
            raise CheckpointError(f"{self._field}: {what}", remedy=_REMEDY) from error
        _refuse_endless(pattern, self._field)
        self._free.append((index, pattern, whole))

    def _first(self, module: str, start: float) -> int | None:
        begins = [0, *(dot.end() for dot in re.finditer(r"\.", module))]
        begins = [begin for begin in begins if len(module) - begin <= _LONGEST]
        names = [(module, True), *((module[begin:], False) for begin in begins)]
        hits = [self._exact[name] for name in names if name in self._exact]
        self._refuse_slow(start)
        for begin in begins:
            alike = self._dotted.get(len(module) - begin, ())
            hits += [index for index, pattern in alike if pattern.fullmatch(module, begin)][:1]
        first = min(hits, default=len(self._values))
        for index, pattern, whole in self._free:
            if index > first:
                break
            self._refuse_slow(start)
            if _ways(pattern, module) > _WAYS:
                raise _unsafe(pattern, self._field, f'has too many ways to match "{shortened(module)}"')
            if whole.match(module):
                return index
        return first if hits else None

    def _refuse_slow(self, start: float) -> None:
        if time.thread_time() - start > _SECONDS:
            what = f"its {len(self._values)} patterns take more than {_SECONDS:g} seconds to match"
            raise CheckpointError(f"{self._field}: {what}", remedy=_REMEDY)


def _length(pattern: str) -> int | None:
    """Of the names that match, where a dot is all that a name may have other; None for what is more."""
    plain = _ESCAPED.sub("x", pattern.removeprefix("^")).replace(".", "x")
    return None if _MORE.search(plain) else len(plain)


def _refuse_endless(pattern: str, field: str) -> None:
    plain = _plain(pattern)
    if re.search(r"\)[*+{]", plain) or len(re.findall(r"[*+{]", plain)) > _REPEATS:
        raise _unsafe(pattern, field, f"repeats a group, or has more than {_REPEATS} repetitions")
    if _ways(pattern, _TYPICAL) > _WAYS:
        raise _unsafe(pattern, field, "leaves too many choices")


def _ways(pattern: str, name: str) -> float:
    """At most so many ways there are to try a pattern on a name: ends of what repeats, choices of "?" and
    "|", and each dot to start after."""
    plain = _plain(pattern)
    repeats = len(re.findall(r"[*+{]", plain))
    choices = 2.0 ** len(re.findall(r"\?", re.sub(r"\(\?", "(", plain)))
    alternatives = [1]
    for character in plain:
        if character == "(":
            alternatives.append(1)
        elif character == "|":
            alternatives[-1] += 1
        elif character == ")" and len(alternatives) > 1:
            choices *= alternatives.pop()
    choices *= math.prod(alternatives)
    ends = max(1.0, len(name) ** repeats / math.factorial(repeats))
    return choices * ends * (name.count(".") + 1)


def _plain(pattern: str) -> str:
    """Escapes and sets, each of which stands for one character, as "x"."""
    return re.sub(r"\\.|\[[^\]]*\]", "x", pattern)


def _unsafe(pattern: str, field: str, what: str) -> CheckpointError:
    return CheckpointError(
        f'{field}: the pattern "{shortened(pattern)}" {what}: matching it may take for ever',
        remedy=_REMEDY,
    )
