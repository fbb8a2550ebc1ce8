"""KnOTS: adapters are brought into one basis by an SVD of all of them, and merged there.

Shape letters: N experts, O outputs and I inputs of a weight, K shared directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from merging.settings import Scale
from merging.shared_space import SharedSpaceMerger, Space
from merging.spec.component import Component, InnerRule
from merging.strategies.ties import Ties

if TYPE_CHECKING:
    from merging.low_rank import LowRank


class Knots(SharedSpaceMerger):
    """Express all adapters in the left singular vectors of [T_1 .. T_N]; merge coordinates by another rule.

    [T_1 .. T_N] = U S [V_1 .. V_N]^T; W = W_0 + scale * U * inner(S V_1^T, .., S V_N^T). The inner rule sees
    the coordinates of all weights as one task vector. Stoica et al., 2024.
    """

    paper = "arXiv:2410.19735"
    memory = (
        "the largest adapted weight three times in float64, and each expert's coordinates of it, of as many "
        "rows as all ranks together"
    )
    together = True

    class Settings(SharedSpaceMerger.Settings):
        scale: Scale = Field(0.6, description="Weight of the merged task vectors.")
        inner: InnerRule = Field(
            Component(type="ties", settings=Ties.Settings.model_validate({})),
            description="The rule that merges the coordinates: its name, or an object with its settings. Its "
            "own scale multiplies this one.",
        )
        concat: Literal["inputs", "outputs"] = Field(
            "inputs",
            description="Along which axis the task vectors are joined for the SVD: side by side, so that the "
            "outputs get a shared basis, or one above the other, so that the inputs do.",
        )
        floor: float = Field(
            1e-5,
            ge=0,
            le=1,
            description="Singular values up to this are dropped; in units of the weights, as published.",
        )

    def space(self, terms: Sequence[LowRank]) -> Space:
        if self.settings.concat == "outputs":
            turned = self._side_by_side([term.transposed for term in terms])
            assert turned.left_OK is not None
            return Space(None, [c.T for c in turned.coordinates_NKL], turned.left_OK.T)
        return self._side_by_side(terms)

    def _side_by_side(self, terms: Sequence[LowRank]) -> Space:
        """U, and U^T T_i, which is S V_i^T."""
        from merging.low_rank import side_by_side

        left_OK = side_by_side(terms, floor=self.settings.floor)
        coordinates = [(left_OK.T @ term.scaled_left()) @ term.right_RI.double() for term in terms]
        return Space(left_OK, coordinates, None)
