"""align: an expert's tensors under the base's names, and everything about it that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from merging.checkpoints.misfits import differing_names, differing_shapes, listed
from merging.checkpoints.names import NameMap, module_names, tie_group
from merging.checkpoints.number_kinds import is_whole
from merging.checkpoints.source import CheckpointSource, RenamedSource
from merging.errors import Problem

_BLOCK = 1 << 22  # elements compared at a time


@dataclass(frozen=True)
class Alignment:
    """`source` has the expert's tensors under the base's names, all of the base's shapes.

    `absent`: tensors of the base that `source` lacks for a good reason (heads, integers, parts outside the
    model); the base's own are to be kept. `extra_heads`: name of a head's tensor -> name in the expert's
    file, for those that the base lacks or has in another shape. `notes`: what was ignored. With `problems`,
    the expert cannot be merged.
    """

    source: RenamedSource
    problems: list[Problem] = field(default_factory=list)
    extra_heads: dict[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def align(
    base: CheckpointSource,
    expert: CheckpointSource,
    model: nn.Module | None,
    is_head: Callable[[str], bool],
    *,
    tied: bool = False,
    vocabulary: Mapping[str, int] | None = None,
    is_outer: Callable[[str], bool] = lambda name: False,
) -> Alignment:
    """Bring the expert's tensors under the base's names: the same name, else the same place in `model`.

    `tied`: the expert's own config ties its head to the embedding; a head that it does not store is then the
    embedding. `vocabulary`: tensors of the base -> the axis of their tokens, of which the expert may have
    others.
    `is_outer`: parts of a larger model around the one that is merged; base or expert may lack them.
    Reads no data, unless a tensor that the base ties has to be compared with its twin.
    """
    return _Matching(base, expert, model, is_head, tied, vocabulary or {}, is_outer).result()


class _Matching:
    def __init__(
        self,
        base: CheckpointSource,
        expert: CheckpointSource,
        model: nn.Module | None,
        is_head: Callable[[str], bool],
        tied: bool,
        vocabulary: Mapping[str, int],
        is_outer: Callable[[str], bool],
    ) -> None:
        self.vocabulary = vocabulary
        self.base, self.expert, self.is_head = base, expert, is_head
        self.base_map, self.expert_map = _mapped(model, base), _mapped(model, expert)
        self.could_tie = dict(getattr(model, "_tied_weights_keys", None) or {})
        self.ties = (self.could_tie if tied else {}) | dict(self.expert_map.ties)
        self.heads: dict[str, str] = {}
        self.absent: list[str] = []
        self.ignored: dict[str, list[str]] = {}
        self.problems: list[Problem] = []
        self.base_outside = _outside(self.base_map) | set(filter(is_outer, base.names()))
        self.expert_outside = _outside(self.expert_map) | set(filter(is_outer, expert.names()))
        self.pairs = self._paired()
        self.by_place = {self.base_map.renamed.get(name, name): pair for name, pair in self.pairs.items()}

    def result(self) -> Alignment:
        missing = [name for name in self.base.names() if name not in self.pairs and not self._may_lack(name)]
        misshapen = [name for name in list(self.pairs) if not self._fits(name)]
        used = {*self.pairs.values(), *self.heads.values()}
        extra = [name for name in self.expert.names() if name not in used and not self._may_have(name)]
        names = {name: self.pairs[name] for name in self.base.names() if name in self.pairs}
        problems = [
            *differing_names(self.expert.label, missing, extra, len(self.base.names())),
            *differing_shapes(self.base, self.expert, {name: self.pairs[name] for name in misshapen}),
            *self.problems,
        ]
        if any(self.base_map.renamed.get(name) in self.could_tie for name in missing):
            remedy = (
                "If the expert ties its head to its embedding, its config must say so (tie_word_embeddings)."
            )
            problems[0] = problems[0]._replace(remedy=remedy)
        notes = [
            f"{self.expert.label}: {reason}: {listed(ignored)}" for reason, ignored in self.ignored.items()
        ]
        return Alignment(
            RenamedSource(self.expert, names), problems, self.heads, tuple(self.absent), tuple(notes)
        )

    def _paired(self) -> dict[str, str]:
        stored = {self.expert_map.renamed.get(name, name): name for name in self.expert.names()}
        same = set(self.expert.names())
        pairs = {}
        for name in self.base.names():
            place = self.base_map.renamed.get(name, name)
            if name in same:
                pairs[name] = name
                continue
            if place in stored:
                pairs[name] = stored[place]
                continue
            shared = [alias for alias in sorted(tie_group(place, self.ties)) if alias in stored]
            if shared:
                pairs[name] = stored[shared[0]]
                self.ignored.setdefault("not stored, taken from what it is tied to", []).append(name)
        return pairs

    def _may_lack(self, name: str) -> bool:
        """Whether the expert need not have this tensor of the base, which then keeps its own."""
        if is_whole(self.base.spec(name).dtype):
            reason = "integers that it does not have, the base's are kept"
        elif self._is_head(name, self.base_map):
            reason = "has no such head, the base's is kept"
        elif name in self.base_map.obsolete:
            reason = "has not what the model computes itself, the base's is kept"
        elif name in self.base_outside:
            reason = "parts of the base outside the model that is merged are kept"
        else:
            return False
        self.ignored.setdefault(reason, []).append(name)
        self.absent.append(name)
        return True

    def _fits(self, name: str) -> bool:
        """Whether a pair has one shape and kind of number; heads and integers are set aside if not."""
        found, wanted = self.expert.spec(self.pairs[name]), self.base.spec(name)
        same_kind = found.dtype.is_floating_point == wanted.dtype.is_floating_point
        if self._same_shape(name) and (same_kind or not wanted.dtype.is_floating_point):
            return True
        if self._is_head(name, self.base_map):
            self.heads[self.base_map.renamed.get(name, name)] = self.pairs.pop(name)
        elif is_whole(wanted.dtype):
            self.ignored.setdefault("integers of another shape, the base's are kept", []).append(name)
            del self.pairs[name]
        else:
            return False
        self.absent.append(name)
        return True

    def _same_shape(self, name: str) -> bool:
        found, wanted = list(self.expert.spec(self.pairs[name]).shape), list(self.base.spec(name).shape)
        axis = self.vocabulary.get(name)
        if axis is not None and len(found) == len(wanted):
            del found[axis], wanted[axis]
        return found == wanted

    def _may_have(self, name: str) -> bool:
        """Whether the base may lack this tensor of the expert; a twin that differs is reported here."""
        place = self.expert_map.renamed.get(name, name)
        twin = next((self.by_place[alias] for alias in self._twins(place)), None)
        if twin is not None:
            self._check_twin(name, twin)
        elif self._is_head(name, self.expert_map):
            self.heads[place] = name
        elif is_whole(self.expert.spec(name).dtype):
            self.ignored.setdefault("integers that the base does not have are ignored", []).append(name)
        elif name in self.expert_map.obsolete:
            self.ignored.setdefault("what the model computes itself is ignored", []).append(name)
        elif name in self.expert_outside:
            self.ignored.setdefault("parts outside the model that is merged are ignored", []).append(name)
        else:
            return False
        return True

    def _twins(self, place: str) -> list[str]:
        return [alias for alias in sorted(tie_group(place, self.expert_map.ties)) if alias in self.by_place]

    def _check_twin(self, name: str, twin: str) -> None:
        """The base ties two tensors and stores one; an expert that stores both must have them equal."""
        if _equal(self.expert, name, twin):
            self.ignored.setdefault("stored although tied, and equal", []).append(name)
            return
        what = f'differs from "{twin}", to which the base ties it: as part of the base it would be lost'
        remedy = "Use a base that does not tie the two (tie_word_embeddings: false, both stored)."
        self.problems.append(Problem(f"{self.expert.label}: {name}", what, remedy))

    def _is_head(self, name: str, names: NameMap) -> bool:
        return self.is_head(name) or self.is_head(names.renamed.get(name, name))


def _mapped(model: nn.Module | None, source: CheckpointSource) -> NameMap:
    return NameMap({}) if model is None else module_names(model, source.names())


def _outside(names: NameMap) -> frozenset[str]:
    """Stored tensors of a larger model, of which the module is the part under one prefix."""
    prefix = names.stripped
    return frozenset(name for name in names.unused if prefix and not name.startswith(prefix))


def _equal(source: CheckpointSource, first: str, second: str) -> bool:
    spec = source.spec(first)
    if spec.shape != source.spec(second).shape:
        return False
    step = max(1, _BLOCK * max(1, spec.shape[0]) // max(1, spec.elements)) if spec.shape else 1
    blocks = [slice(start, start + step) for start in range(0, spec.shape[0], step)] if spec.shape else [None]
    return all(bool((source.read(first, rows) == source.read(second, rows)).all()) for rows in blocks)
