"""What every merge rule and calibrator tells about itself: name, needs, settings, paper, memory law."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from merging.limits import USUAL, Limits
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from merging.costs.cost import Cost
    from merging.costs.sizes import Sizes

Progress: TypeAlias = Callable[[str, int, int], None]
"""Told often by long work: stage, done, total."""


def silent(stage: str, done: int, total: int) -> None:
    """The Progress of those who do not want to know."""


class Method:
    """Base of Merger and Calibrator. Everything that `merging list`, `merging show` and the docs print is
    read here."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()  # of: base, data, heads, labels, gradients, low rank
    memory: ClassVar[str] = (
        ""  # the memory law, for people; S: the largest tensor, D: the widest linear, N: experts
    )
    limits: Limits = USUAL  # of memory and threads; whoever runs the method sets them before
    weighted: ClassVar[bool] = False  # whether the experts' weights mean something to this method

    class Settings(BaseSettings):
        """No settings."""

    def __init__(self, settings: BaseSettings | None = None, *, seed: int = 0, **values: Any) -> None:
        """Settings as an object, or by name: `Ties(density=0.3)`."""
        self.settings: Any = settings if settings is not None else type(self).Settings(**values)
        self.seed = seed

    def cost(self, sizes: Sizes) -> Cost:
        """The memory law in numbers, and the operations, with these settings; if a method says nothing of its
        own: all models whole, in float32, each entry gone over a few times."""
        from merging.costs.cost import Cost, Work

        entries = (sizes.experts + 1) * sizes.parameters
        read = sizes.base_bytes + sizes.expert_bytes
        work = Work(entries=4.0 * entries, read=read, written=sizes.output_bytes)
        return Cost(memory=4.0 * entries, work=work)

    @classmethod
    def summary(cls) -> str:
        """The first sentence of the docstring."""
        return (cls.__doc__ or "").strip().split("\n")[0]
