"""SLERP: interpolation between two models along an arc.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from merging.settings import Settings as BaseSettings
from merging.span_merger import SpanMerger

if TYPE_CHECKING:
    from torch import Tensor


class Slerp(SpanMerger):
    """Interpolate between two models along an arc, tensor by tensor: two experts, or the base and one expert.

    W = [sin((1 - t) theta) A + sin(t theta) B] / sin theta, theta the angle between A and B. With one expert
    A is the base and B the expert; with two, t is the second's share of their weights. Shoemake, 1985.
    """

    paper = "doi:10.1145/325334.325242"
    memory = "a row block of each model, in float64, and up to 32 blocks as stored; whatever the model's size"
    weighted = True
    differences = False

    class Settings(BaseSettings):
        t: float | None = Field(
            None,
            ge=0,
            le=1,
            description="How far to go from the base (0) to the one expert (1); half way if not given (t).",
        )
        linear_above: float = Field(
            0.9995, gt=0, le=1, description="Interpolate linearly where |cos theta| is above this."
        )

    @classmethod
    def check(cls, settings: Any, weights: Mapping[str, float]) -> list[str]:
        if len(weights) not in (1, 2):
            return [f"slerp takes one or two experts, {len(weights)} are given"]
        problems = []
        if len(weights) == 1 and set(weights.values()) != {1}:
            problems.append('with one expert "t" says how far to go; leave out "weight"')
        if len(weights) == 2 and settings.t is not None:
            problems.append('with two experts their weights say how far to go; leave out "t"')
        if min(weights.values()) < 0 or sum(weights.values()) == 0:
            problems.append("the weights must not be negative, nor all 0")
        return problems

    @property
    def with_base(self) -> bool:
        return len(self.experts) == 1

    def factors(self, products_MM: Tensor) -> Tensor:
        from merging.spheres import slerp_factors

        if self.with_base:
            t = 0.5 if self.settings.t is None else self.settings.t
        else:
            t = float(self.weights_N[1] / self.weights_N.sum())
        return slerp_factors(products_MM, t, self.settings.linear_above)
