"""NormalEquations: fold one task at a time, then solve. Memory does not grow with the number of tasks.

Shape letters: D inputs and O outputs of a linear (or of all linears of one feed, stacked along O).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from merging import native
from merging.allocator import give_back
from merging.moments import mirror_, row_blocks
from merging.symmetric_systems import DTYPE, Factor, condition_of, factor_, pseudo_solve, restore_


@dataclass(frozen=True)
class SolveHealth:
    """How well a system could be solved; goes into the report."""

    features: int
    tokens: int
    condition: float  # estimated, of the system on unit diagonal; infinite where it is singular
    ridge: float
    residual: float  # relative to the right-hand side
    fallback: str  # "" or what was done instead of a Cholesky solve
    rank: int = 0  # directions that the system tells apart
    damping: float = 0.0  # what was added to the diagonal alone, relative to its mean

    @property
    def short_of_tokens(self) -> bool:
        return self.tokens < self.features


class NormalEquations:
    """W · lhs = rhs with lhs = sum of s·G and rhs = sum of s·W_i·G_i, or of s·met, over the tasks folded in.

    With a `reference` R near the W_i, what is kept of the right side is rhs - R·lhs = sum of s·(W_i - R)·G_i:
    that loses no digits to what the W_i have in common, so that products in float32 do."""

    def __init__(self, inputs: int, outputs: int, reference_OD: Tensor | None = None) -> None:
        self._lhs = _HalfSum(inputs)
        self._scaled: _Scaled | None = None  # what a solve has made of lhs
        self.gap_OD = torch.zeros(outputs, inputs, dtype=DTYPE)  # rhs - R · lhs
        self.reference_OD = reference_OD
        self.scale = 0.0  # sum of the task scales
        self.tokens = 0
        self.mean_D = torch.zeros(inputs, dtype=DTYPE)
        self.offset_O = torch.zeros(outputs, dtype=DTYPE)
        self.health: SolveHealth | None = None
        self._noise = torch.finfo(DTYPE).eps

    @property
    def lhs_DD(self) -> Tensor:
        """Sum of s · G (D D)."""
        self._unscale()
        return self._lhs.whole()

    def _unscale(self) -> None:
        if self._scaled is not None:
            self._scaled.restore_()
            self._scaled = None

    def add(
        self,
        weight_OD: Tensor,
        gram_DD: Tensor,
        *,
        scale: float = 1.0,
        tokens: int = 0,
        shrink: float = 1.0,
    ) -> None:
        """lhs += scale · gram; rhs += scale · weight · gram, with the gram's off-diagonal times `shrink`."""
        if self.reference_OD is None:
            apart_OD = weight_OD.to(DTYPE)
        else:
            apart_OD = weight_OD - self.reference_OD.to(weight_OD.device)
        met_OD = apart_OD @ gram_DD.to(apart_OD)
        if shrink != 1:
            diagonal_D = gram_DD.diagonal().to(apart_OD)
            met_OD.mul_(shrink).addcmul_(apart_OD, diagonal_D, value=1 - shrink)
        self._add(met_OD, gram_DD, scale, tokens, shrink)

    def add_met(self, met_OD: Tensor, gram_DD: Tensor, *, scale: float = 1.0, tokens: int = 0) -> None:
        """lhs += scale · gram; rhs += scale · met, for what the weight makes of targets: E[W x_target xᵀ]."""
        if self.reference_OD is not None:
            raise ValueError("equations with a reference take weights, not what they make of targets")
        self._add(met_OD, gram_DD, scale, tokens)

    def _add(self, met_OD: Tensor, gram_DD: Tensor, scale: float, tokens: int, shrink: float = 1.0) -> None:
        self._unscale()
        self._lhs.add(gram_DD, scale, shrink)
        _add_scaled(self.gap_OD, met_OD, scale)
        self.scale += scale
        self.tokens += tokens
        self._noise = max(self._noise, torch.finfo(gram_DD.dtype).eps)

    def add_offset(self, offset_O: Tensor, mean_D: Tensor, *, scale: float = 1.0) -> None:
        """For biases: offset += scale · (b_i + W_i µ_target), mean += scale · µ."""
        self.offset_O += (offset_O * scale).to(self.offset_O)
        self.mean_D += (mean_D * scale).to(self.mean_D)

    def solve(self, *, ridge: float = 0.0, anchor_OD: Tensor | None = None, damping: float = 0.0) -> Tensor:
        """W = (rhs + ridge · anchor)(lhs + (ridge + damping) I)⁻¹, in float64.

        Where the system cannot be solved by Cholesky, the solution is sought as anchor plus a correction, so
        that directions in which it says nothing (dead features, fewer tokens than features) keep the anchor.
        `damping` has no counterpart on the right side."""
        lhs_DD = self.lhs_DD
        features, mean_diagonal = len(lhs_DD), float(lhs_DD.diagonal().mean())
        self._scaled = system = _Scaled(lhs_DD, ridge + damping)
        anchor_OD = torch.zeros_like(self.gap_OD) if anchor_OD is None else anchor_OD.to(self.gap_OD)
        factor = system.factor()
        condition, fallback, dropped = float("inf"), "", 0
        if factor is not None:
            condition = condition_of(factor)
        if factor is not None and condition * self._noise < _USABLE:
            start_OD = None if self.reference_OD is None else self.reference_OD.to(self.gap_OD)
            wanted_OD = self._wanted(start_OD, anchor_OD, ridge, damping)
            delta_OD = factor.solved(wanted_OD.div_(system.size_D).T).T.div_(system.size_D)
            del wanted_OD
            system.unfactor_()
        else:
            system.unfactor_()
            start_OD = anchor_OD
            wanted_OD = self._wanted_from_anchor(anchor_OD, damping, system)
            cutoff = features * self._noise
            delta_OD, dropped = pseudo_solve(system.unit_DD, system.size_D, wanted_OD, cutoff)
            fallback = f"pseudo-inverse without {dropped} of {features} directions"
        solution_OD = delta_OD if start_OD is None else delta_OD.add_(start_OD)
        self.health = SolveHealth(
            features=features,
            tokens=self.tokens,
            condition=condition,
            ridge=ridge,
            residual=self._residual(solution_OD, anchor_OD, ridge, system),
            fallback=fallback,
            rank=features - dropped,
            damping=damping / mean_diagonal if mean_diagonal > 0 else 0.0,
        )
        return solution_OD

    def _wanted(self, start_OD: Tensor | None, anchor_OD: Tensor, ridge: float, damping: float) -> Tensor:
        """What the change from the reference (None: from 0) has to make of lhs + (ridge + damping) I."""
        wanted_OD = torch.add(self.gap_OD, anchor_OD, alpha=ridge)
        return wanted_OD if start_OD is None else wanted_OD.sub_(start_OD, alpha=ridge + damping)

    def _wanted_from_anchor(self, anchor_OD: Tensor, damping: float, system: _Scaled) -> Tensor:
        apart_OD = -anchor_OD if self.reference_OD is None else self.reference_OD.to(anchor_OD) - anchor_OD
        wanted_OD = self.gap_OD - damping * anchor_OD
        if not bool((apart_OD != 0).any()):
            return wanted_OD
        return wanted_OD.add_(system.times(apart_OD)).sub_(apart_OD, alpha=system.added)

    def _residual(self, solution_OD: Tensor, anchor_OD: Tensor, ridge: float, system: _Scaled) -> float:
        """What is missing to rhs + ridge · anchor, relative to it; of some outputs, which tell for all."""
        some = slice(None, None, max(1, len(solution_OD) // _PROBED))
        rhs_PD = self.gap_OD[some] + ridge * anchor_OD[some]
        if self.reference_OD is not None:
            reference_PD = self.reference_OD[some].to(rhs_PD)
            rhs_PD = rhs_PD + system.times(reference_PD) - system.added * reference_PD
        made_PD = system.times(solution_OD[some])
        return float((made_PD - rhs_PD).norm()) / (float(rhs_PD.norm()) or 1.0)

    def solve_bias(self, weight_OD: Tensor, *, ridge: float = 0.0, anchor_O: Tensor | None = None) -> Tensor:
        """b = (offset - W · mean + ridge · anchor) / (sum of scales + ridge)."""
        anchor = torch.zeros_like(self.offset_O) if anchor_O is None else anchor_O.to(self.offset_O)
        return (self.offset_O - weight_OD.to(DTYPE) @ self.mean_D + ridge * anchor) / (self.scale + ridge)


class _HalfSum:
    """A sum of Grams: of each row block what is right of its first column, until the whole is asked for."""

    def __init__(self, features: int) -> None:
        self._rows = row_blocks(features)
        self._parts = [torch.zeros(stop - start, features - start, dtype=DTYPE) for start, stop in self._rows]
        self._whole_DD: Tensor | None = None  # the parts are then views of it
        self._mirrored = False

    def add(self, gram_DD: Tensor, scale: float, shrink: float) -> None:
        for part, (start, stop) in zip(self._parts, self._rows, strict=True):
            _add_scaled(part, gram_DD[start:stop, start:], scale * shrink)
            if shrink != 1:
                part.diagonal().add_(gram_DD.diagonal()[start:stop].to(part), alpha=scale * (1 - shrink))
        self._mirrored = False

    def whole(self) -> Tensor:
        if self._whole_DD is None:
            features = self._rows[-1][1]
            self._whole_DD = torch.empty(features, features, dtype=DTYPE)
            for place, (start, stop) in enumerate(self._rows):  # one part goes as the next one comes
                view = self._whole_DD[start:stop, start:]
                self._parts[place] = view.copy_(self._parts[place])
            give_back()
        if not self._mirrored:
            mirror_(self._whole_DD)
            self._mirrored = True
        return self._whole_DD


class _Scaled:
    """lhs + added · I, in the place of lhs, as S · unit · S with a unit diagonal: sums round relative to the
    features' own sizes, so that what drowns in noise shows only there."""

    def __init__(self, lhs_DD: Tensor, added: float) -> None:
        lhs_DD.diagonal().add_(added)
        size_D = lhs_DD.diagonal().clamp_min(0).sqrt()
        self.size_D = torch.where(size_D > 0, size_D, torch.ones_like(size_D))
        self.unit_DD = lhs_DD.div_(self.size_D[:, None]).div_(self.size_D[None, :])
        self.added = added
        self._heads: list[tuple[int, int, Tensor]] = []

    def factor(self) -> Factor | None:
        """Cholesky of `unit_DD`, where that is possible. May use its memory, until `unfactor_`."""
        found, self._heads = factor_(self.unit_DD)
        return found

    def unfactor_(self) -> None:
        restore_(self.unit_DD, self._heads)
        self._heads = []

    def times(self, rows_OD: Tensor) -> Tensor:
        """rows · (lhs + added · I)."""
        return ((rows_OD * self.size_D) @ self.unit_DD).mul_(self.size_D)

    def restore_(self) -> None:
        """lhs is what it was, but for rounding."""
        self.unit_DD.mul_(self.size_D[:, None]).mul_(self.size_D[None, :]).diagonal().sub_(self.added)


def _add_scaled(total: Tensor, part: Tensor, scale: float) -> None:
    """total += scale · part, rows at a time: a copy in float64 of the whole would only be fetched from memory
    again."""
    if native.add_scaled_(total, part, scale):
        return
    step = max(1, _AT_ONCE // max(1, total.shape[1]))
    for start in range(0, len(total), step):
        total[start : start + step].add_(part[start : start + step].to(total), alpha=scale)


_AT_ONCE = 1 << 17  # entries
_PROBED = 16  # outputs
_USABLE = (
    0.5  # condition times rounding error of the sums: above this, the smallest directions are only noise
)


class NormEquations:
    """Scale and shift of a norm, channel by channel: fit gamma_i z + beta_i of every task (FeatCal's 2 x 2
    systems)."""

    def __init__(self, features: int, *, shift: bool) -> None:
        """`shift`: whether the norm has one (an RMSNorm has only a scale)."""
        self.shift = shift
        self.tasks = 0
        self.square_D = torch.zeros(features, dtype=DTYPE)
        self.mean_D = torch.zeros(features, dtype=DTYPE)
        self.rhs_scale_D = torch.zeros(features, dtype=DTYPE)
        self.rhs_shift_D = torch.zeros(features, dtype=DTYPE)

    def add(self, scale_D: Tensor, shift_D: Tensor | None, *, mean_D: Tensor, square_D: Tensor) -> None:
        """Fold in one task, with equal weight: its scale and shift, and E[z], E[z²] of the normalised
        inputs."""
        scale, mean, square = scale_D.to(DTYPE), mean_D.to(DTYPE), square_D.to(DTYPE)
        shift = torch.zeros_like(scale) if shift_D is None else shift_D.to(DTYPE)
        self.tasks += 1
        self.square_D += square
        self.mean_D += mean
        self.rhs_scale_D += square * scale + mean * shift
        self.rhs_shift_D += mean * scale + shift

    def solve(
        self, *, ridge: float, anchor_scale_D: Tensor, anchor_shift_D: Tensor | None, floor: float
    ) -> tuple[Tensor, Tensor | None]:
        """The ridge solution towards the anchors; `floor` bounds the determinant from below."""
        square = self.square_D + ridge
        rhs_scale = self.rhs_scale_D + ridge * anchor_scale_D.to(DTYPE)
        if not self.shift or anchor_shift_D is None:
            return rhs_scale / square.clamp_min(floor), None
        count = self.tasks + ridge
        rhs_shift = self.rhs_shift_D + ridge * anchor_shift_D.to(DTYPE)
        determinant = (square * count - self.mean_D.square()).clamp_min(floor)
        scale_D = (rhs_scale * count - self.mean_D * rhs_shift) / determinant
        shift_D = (square * rhs_shift - self.mean_D * rhs_scale) / determinant
        return scale_D, shift_D
