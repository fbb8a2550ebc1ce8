"""How well the closed-form systems could be solved, and what became of each parameter."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from merging.report.entry import Entry


class SolverRow(Entry):
    """Health of one solve: a feed's linears, or a norm."""

    module: str
    block: str
    features: int = Field(description="Inputs of the linears: the size of the system.")
    tokens: int = Field(description="Tokens of all tasks that went into it.")
    condition: float = Field(description="Estimated ratio of the largest to the smallest eigenvalue.")
    ridge: float = Field(description="What was added to the diagonal.")
    residual: float = Field(description="Relative to the right-hand side.")
    fallback: str = Field(default="", description="What was done instead of a Cholesky solve, if anything.")
    rank: int = Field(
        default=0, description="Directions that the system tells apart; in the others the anchor stays."
    )
    damping: float = Field(
        default=0.0, description="What was added to the diagonal to steady the solve, relative to its mean."
    )

    @property
    def short_of_tokens(self) -> bool:
        return self.tokens < self.features


UNSEEN = "not calibrated (n = 0): no token of the examples reaches it"


class ParameterFate(Entry):
    """`solved`: calibrated; `merged`: what the merge rule gave; `copied`: the base's, untouched."""

    state: Literal["solved", "merged", "copied"]
    reason: str = Field(default="", description="Why it was not calibrated, or not merged.")
