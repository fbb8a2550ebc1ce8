"""What every merge rule and calibrator tells about itself: name, needs, settings, paper, memory law."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pydantic import ValidationError

from merging.arguments import SEED, found
from merging.errors import SpecError
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
        """Settings as an object, or by name: `Ties(density=0.3)`. SpecError for those that do not fit."""
        if problems := SEED("seed", seed):
            raise SpecError(f"{type(self).__name__}() cannot be called like this", problems=problems)
        self.settings: Any = _settings(type(self), settings, values)
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


def _settings(method: type[Method], given: BaseSettings | None, values: dict[str, Any]) -> BaseSettings:
    """The object, or one of these values, checked."""
    called = f'"{method.name}"' if method.name else method.__name__
    if given is not None and not isinstance(given, BaseSettings):
        raise SpecError(
            f"settings of {called}: found {found(given)}, expected {method.__name__}.Settings(...)",
            remedy=f"Or give them by name, as in {method.__name__}(setting=value).",
        )
    if given is not None and values:
        raise SpecError(
            f"settings of {called} are given twice: as an object, and {', '.join(sorted(values))} by name",
            remedy="Give all in one of these ways.",
        )
    if given is not None:
        return given
    try:
        return method.Settings(**values)
    except ValidationError as error:
        from merging.spec.findings import told

        raise SpecError(f"settings of {called}", problems=told(error, values, method.Settings)) from error
