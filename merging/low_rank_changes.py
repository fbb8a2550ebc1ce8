"""LowRankChanges: what experts change of a base, as factors where it is a matrix.

Shape letters: O outputs and I inputs of a weight, S the shape of any tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from merging.checkpoints.sink import CheckpointSink
from merging.checkpoints.source import CheckpointSource
from merging.contracts.models import Models
from merging.errors import CheckpointError, Problem
from merging.finite import refuse_unless_finite
from merging.low_rank import LowRank, factored
from merging.matrix_merger import transposed_weights

NOISE = 1e-4  # of the largest singular value: what lies below is rounding of a stored sum


class LowRankChanges:
    """`matrices` and `vectors`: the tensors that some expert changes. Kernels count as matrices.

    Raises CheckpointError where an expert's change is known to be of full rank.
    """

    def __init__(self, models: Models, rule: str) -> None:
        self._models = models
        self._experts = tuple(sorted(models.tasks))
        self._found: dict[tuple[str, str], LowRank] = {}  # of experts that are full checkpoints
        self._turned = transposed_weights(models.base)
        self.matrices: dict[str, None] = {}
        self.vectors: dict[str, None] = {}
        problems: list[Problem] = []
        for name in models.base.names():
            spec = models.base.spec(name)
            if not spec.dtype.is_floating_point or name in models.kept or not spec.elements:
                continue
            if len(spec.shape) < 2:
                if any(self._differs(name, task) for task in self._experts):
                    self.vectors[name] = None
                continue
            ranks = [self._rank(name, task, problems) for task in self._experts]
            if any(ranks):
                self.matrices[name] = None
        if problems:
            raise CheckpointError(
                f"{rule} merges changes of low rank, and these are not",
                problems=problems[:10],
                remedy='Give adapters ({"adapter": ...}), or use a rule for any task vectors, like "ties".',
            )

    def terms(self, name: str) -> list[LowRank]:
        """Each expert's change of a matrix, outputs first, in the order of the experts' names."""
        terms = [self._term(name, task) for task in self._experts]
        return [term.transposed for term in terms] if name in self._turned else terms

    def laid_out(self, name: str, delta_OI: Tensor) -> Tensor:
        """A change in the base's own layout."""
        shape = self._models.base.spec(name).shape
        return (delta_OI.T if name in self._turned else delta_OI).reshape(shape)

    def _term(self, name: str, task: str) -> LowRank:
        expert = self._models.experts[task]
        known = expert.factors(name)
        if known is not None:
            for factor in (known.left_OR, known.right_RI):
                refuse_unless_finite(factor, label=expert.label, name=name)
            return known
        if (task, name) not in self._found:
            delta_OI = _delta(self._models.base, expert, name).flatten(1)
            largest = float(torch.linalg.matrix_norm(delta_OI, 2)) if delta_OI.any() else 0.0
            self._found[task, name] = factored(delta_OI, noise=NOISE * largest)
        return self._found[task, name]

    def _rank(self, name: str, task: str, problems: list[Problem]) -> int:
        expert = self._models.experts[task]
        term = self._term(name, task)
        full = min(term.left_OR.shape[0], term.right_RI.shape[1])
        if expert.factors(name) is None and 2 * term.rank > full:
            problems.append(Problem(f"{expert.label}: {name}", f"its change has rank {term.rank} of {full}"))
        return term.rank

    def _differs(self, name: str, task: str) -> bool:
        known = self._models.experts[task].factors(name)
        if known is not None:
            return known.rank > 0
        return bool(_delta(self._models.base, self._models.experts[task], name).any())


def write_vector(name: str, models: Models, sink: CheckpointSink, scale: float) -> None:
    """The base plus the experts' weighted mean change."""
    weights = [models.weights[task] for task in sorted(models.tasks)]
    deltas = [_delta(models.base, models.experts[task], name) for task in sorted(models.tasks)]
    total = sum(weight * delta_S for weight, delta_S in zip(weights, deltas, strict=True))
    divisor = sum(weights) if abs(sum(weights)) > 1e-8 else 1.0
    sink.write(name, models.base.read(name).double() + scale * total / divisor)


def _delta(base: CheckpointSource, expert: CheckpointSource, name: str) -> Tensor:
    expert_S = expert.read(name).double()
    refuse_unless_finite(expert_S, label=expert.label, name=name)
    return expert_S - base.read(name).double()
