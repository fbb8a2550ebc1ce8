"""Backbone: what the framework needs to know of an architecture, and nothing of any method.

Shape letters: B examples, T tokens, F final feature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from merging.errors import TracingError
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

Batch: TypeAlias = "Mapping[str, Tensor]"
"""Keyword arguments of a model's forward, first axis = example."""


@dataclass(frozen=True)
class Location:
    """Where a weight lies that shares a stored tensor with others: the tensor's name, and its rows."""

    name: str
    rows: slice


class Backbone(ABC):
    """One architecture, read from a checkpoint's config. Subclasses declare what differs; most need a dozen
    lines."""

    name: ClassVar[str] = ""
    model_types: ClassVar[frozenset[str]] = (
        frozenset()
    )  # values of `model_type` in config.json that `auto` gives to it
    head_patterns: ClassVar[
        tuple[str, ...]
    ] = ()  # tensors that belong to one task: kept per task, never merged

    outer_patterns: ClassVar[
        tuple[str, ...]
    ] = ()  # parts of a larger model around the one that is walked: base or experts may lack them
    weights_file: ClassVar[str | None] = (
        None  # the one file that its weights must be in; None: any, or shards
    )
    unread_patterns: ClassVar[tuple[str, ...]] = ()  # what nothing reads: never merged, experts may lack it

    class Settings(BaseSettings):
        """No settings."""

    def __init__(
        self, config: Any, settings: BaseSettings | None = None, *, folder: Path | None = None
    ) -> None:
        """`config`: a transformers config, or a function that reads it when it is first asked for; `folder`:
        where tokenizer and processor lie."""
        self._config, self.folder = config, folder
        self.settings: Any = settings if settings is not None else type(self).Settings()

    @property
    def config(self) -> Any:
        if isinstance(self._config, partial):
            self._config = self._config()
        return self._config

    @classmethod
    def summary(cls) -> str:
        """The first sentence of the docstring."""
        return (cls.__doc__ or "").strip().split("\n")[0]

    @abstractmethod
    def skeleton(self) -> nn.Module:
        """The model in eval mode: parameters on the meta device, buffers real."""

    @abstractmethod
    def stacks(self, model: nn.Module) -> tuple[str, ...]:
        """Names of the lists of like layers, in forward order: ("encoder.layers",)."""

    def module_names(self, names: tuple[str, ...]) -> dict[str, str]:
        """Names in a checkpoint -> names in the module, by the model class's own rules; the rest is left
        out."""
        return {name: name for name in names}

    def parts(self, names: tuple[str, ...]) -> Mapping[str, Location]:
        """Weights that lie together in one of these stored tensors (q, k and v of a fused projection): what
        each is called -> where it lies. `module_names` and methods that walk the model see these."""
        return {}

    @property
    def merges_parts(self) -> bool:
        """Whether tensor-wise rules see them one by one, too, and not the tensor as it is stored."""
        return False

    def sees(self, batch: Batch, stack: str) -> bool:
        """Whether the batch reaches that stack: of two towers, one may be given nothing."""
        return True

    def how_to_load(self, folder: str) -> str:
        """Code that opens a result in that folder; empty: as any model of transformers."""
        return ""

    def remarks(self) -> tuple[str, ...]:
        """What a user should know of how this checkpoint is read, for plan and report."""
        return ()

    def resize_vocabulary(self, before: int, now: int) -> None:
        """From now on the model has that many tokens, as results have to which experts add theirs."""

    def read_by_heads(self) -> None:
        """From now on the model is walked without an output head of its own: the experts have theirs, which
        read what the backbone hands to it."""

    def is_head(self, name: str) -> bool:
        """Whether the stored tensor belongs to one task's head."""
        return any(fnmatch(name, pattern) for pattern in self.head_patterns)

    def is_outer(self, name: str) -> bool:
        """Whether the stored tensor is of a larger model, of which only a part is walked."""
        return any(fnmatch(name, pattern) for pattern in self.outer_patterns)

    def keeps(self, name: str) -> bool:
        """Whether the stored tensor is never merged: a head, or something that nothing reads."""
        return self.is_head(name) or any(fnmatch(name, pattern) for pattern in self.unread_patterns)

    def forward_kwargs(self, batch: Batch) -> dict[str, Any]:
        """What the model is called with: the batch, and caches off."""
        return dict(batch)

    def example(self) -> Batch:
        """A smallest batch that the model takes, to look at what it does; contents do not matter."""
        raise TracingError(f'backbone "{self.name}" gives no example batch')

    def token_weights(
        self, batch: Batch, stack: str, module: str, tokens: tuple[int, ...], last: bool
    ) -> Tensor | None:
        """Weights of shape `tokens` (B T) in the statistics of that linear or norm; None: all weigh 1.

        Padding weighs 0. `last`: in the stack's last block, tokens that the head does not read may weigh
        less."""
        return None

    @abstractmethod
    def features(self, output: Any, batch: Batch) -> Tensor:
        """What heads read (B F), from the model's output."""
