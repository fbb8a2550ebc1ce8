"""Task and CalibrationData: the examples a run uses, drawn once, held fixed, fingerprinted.

Shape letters: B examples, C classes, F final feature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from merging.contracts.backbone import Batch
from merging.errors import DataError
from merging.evaluation.metric_spec import AccuracySpec, MetricSpec

if TYPE_CHECKING:
    from torch import Tensor

    from merging.data.dense import Dense


class Examples(ABC):
    """A fixed, ordered set of model inputs, with labels where the source has them."""

    asked: int | None = None  # how many examples the spec asked for; None: all
    notes: tuple[str, ...] = ()  # what the report should warn of
    batch_size: int = 16  # examples in a batch, at most
    automatic: bool = False  # whether the spec leaves that open, so that a run may choose it
    classes: tuple[str, ...] = ()  # their names by the numbers of labels, where they are known
    found_classes: bool = False  # whether these are the sorted names that were met, of which some may lack

    @abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abstractmethod
    def batches(self) -> Sequence[Batch]:
        """The inputs, batch by batch, always the same, read when asked for; the last batch may be smaller."""

    @property
    @abstractmethod
    def labels(self) -> Tensor | None:
        """Class indices (all examples), or None."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the contents (inputs and labels) and their order."""

    @abstractmethod
    def hashes(self) -> tuple[str, ...]:
        """One hash per example of its inputs, to find overlap between splits."""

    def renumber_(self, names: Sequence[str]) -> None:
        """Number labels by the names' places in this list, which has all of `classes`; where these were
        found."""
        raise NotImplementedError


_TINY = 1e-12

Head: TypeAlias = "Callable[[Tensor], Tensor]"
"""Features (B F) -> scores of the classes (B C); a LinearHead, as a rule."""


class CalibrationData(Mapping[str, Examples]):
    """Task name -> calibration examples, in the order of the experts; with `heads` for who needs them."""

    def __init__(self, examples: Mapping[str, Examples], heads: Mapping[str, Head] | None = None) -> None:
        self._examples = dict(examples)
        self.heads: dict[str, Head] = dict(heads or {})

    def __getitem__(self, task: str) -> Examples:
        return self._examples[task]

    def __iter__(self) -> Iterator[str]:
        return iter(self._examples)

    def __len__(self) -> int:
        return len(self._examples)

    @property
    def fingerprints(self) -> dict[str, str]:
        return {task: examples.fingerprint for task, examples in self._examples.items()}

    def require(self, tasks: Iterable[str], *, heads: bool = False) -> None:
        """Raise a DataError that names the tasks without examples or, with `heads`, without a head."""
        tasks = tuple(tasks)
        if missing := [task for task in tasks if task not in self or not len(self[task])]:
            raise DataError(
                f"no calibration examples for {', '.join(missing)}",
                remedy='Give each expert a "calibration" source under "tasks".',
            )
        if heads and (missing := [task for task in tasks if task not in self.heads]):
            raise DataError(
                f"no head for {', '.join(missing)}",
                remedy='Give each task one: "head": {"type": "linear", "path": "..."}.',
            )


class LinearHead:
    """Scores = features @ weight^T + bias. `shape`: classes, features. With `dense`, a layer of some classes
    of transformers, it reads what that makes of the features, and `shape` has what `dense` reads."""

    def __init__(
        self,
        weight_CF: Tensor,
        bias_C: Tensor | None = None,
        *,
        normalises: bool = False,
        dense: Dense | None = None,
    ) -> None:
        """`normalises`: features are brought to length 1 first, as CLIP's zero-shot heads read them."""
        self._made: Callable[[], Tensor] = lambda: weight_CF
        read = weight_CF if dense is None else dense.weight_HF
        self.shape: tuple[int, int] = (weight_CF.shape[0], read.shape[-1])
        self.dense = dense
        self.bias_C, self.normalises = bias_C, normalises
        self.names: tuple[str, ...] = ()

    @classmethod
    def later(
        cls, made: Callable[[], Tensor], shape: tuple[int, int], *, normalises: bool, names: tuple[str, ...]
    ) -> LinearHead:
        """A head whose weight (C F) is made when it is first asked for; `names` are those of its classes."""
        head = cls.__new__(cls)
        head._made, head.shape, head.bias_C = made, shape, None
        head.dense = None
        head.normalises, head.names = normalises, names
        return head

    @cached_property
    def weight_CF(self) -> Tensor:
        return self._made()

    @property
    def fingerprint(self) -> str:
        """A hash of weight and bias."""
        from merging.data.hashing import tensors_hash

        known = tensors_hash([self.weight_CF, *([] if self.bias_C is None else [self.bias_C])])
        known = known if self.dense is None else f"{known}-{self.dense.fingerprint}"
        return f"{known}-normalised" if self.normalises else known

    def __call__(self, features_BF: Tensor) -> Tensor:
        if self.normalises:
            features_BF = features_BF / features_BF.norm(dim=-1, keepdim=True).clamp_min(_TINY)
        if self.dense is not None:
            features_BF = self.dense(features_BF)
        scores_BC = features_BF @ self.weight_CF.to(features_BF).T
        return scores_BC if self.bias_C is None else scores_BC + self.bias_C.to(scores_BC)


@dataclass(frozen=True)
class Task:
    """What is known about one task: examples to calibrate on, to choose on and to test on, and its head."""

    name: str
    calibration: Examples | None = None
    test: Examples | None = None
    head: LinearHead | None = None
    metric: MetricSpec = field(default_factory=AccuracySpec)
    validation: Examples | None = None
    notes: tuple[str, ...] = field(default=())
