"""SharedSpaceMerger: low-rank task vectors are merged in coordinates of a basis which all experts share.

Shape letters: N experts, O outputs and I inputs of a weight, R rank, K and L the sizes of the two bases.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from merging.contracts.merger import MergeNotes, Merger, TensorMerger
from merging.contracts.method import Progress, silent
from merging.settings import Settings as BaseSettings
from merging.spec.component import InnerRule, find_class

if TYPE_CHECKING:
    from torch import Tensor

    from merging.checkpoints.sink import CheckpointSink
    from merging.contracts.models import Models
    from merging.data.task import CalibrationData
    from merging.low_rank import LowRank


class Space(NamedTuple):
    """T_i = left @ coordinates_i @ right, for each expert; None stands for the identity."""

    left_OK: Tensor | None
    coordinates_NKL: list[Tensor]
    right_LI: Tensor | None

    def back(self, merged_KL: Tensor) -> Tensor:
        """A merged task vector (O I), from merged coordinates."""
        half_OL = merged_KL if self.left_OK is None else self.left_OK @ merged_KL
        return half_OL if self.right_LI is None else half_OL @ self.right_LI


class SharedSpaceMerger(Merger):
    """A rule that finds bases shared by the experts' changes of a weight. Subclass it and write `space`.

    Any rule for single tensors then merges the coordinates, as if they were task vectors of a base of zeros;
    the result is carried back and added to the base. Experts are adapters, or checkpoints whose change has a
    low rank.
    """

    needs = frozenset({"base", "low rank"})
    by_layer = frozenset({"scale", "others"})
    weighted = True
    together: ClassVar[bool] = (
        False  # True: the inner rule sees the coordinates of all weights as one task vector
    )

    class Settings(BaseSettings):
        scale: float = Field(1.0, description="Weight of the merged task vectors.")
        inner: InnerRule = Field(description="The rule that merges the coordinates.")
        others: Literal["mean", "base"] = Field(
            "mean",
            description="What becomes of vectors (biases, norms) that experts have changed: their mean "
            "change is added to the base, or they stay the base's.",
        )

    @classmethod
    def check(cls, settings: Any, weights: Mapping[str, float]) -> list[str]:
        name = settings.inner.type
        inner = find_class("strategies", name)
        if not issubclass(inner, TensorMerger) or not inner.needs <= {"base"}:
            return [f'inner: "{name}" does not merge single tensors without data, as an inner rule must']
        if not inner.weighted and any(weight != 1 for weight in weights.values()):
            return [f'inner: "{name}" does not use weights; leave out "weight"']
        return [f"inner: {problem}" for problem in inner.check(settings.inner.settings, weights)]

    @abstractmethod
    def space(self, terms: Sequence[LowRank]) -> Space:
        """Bases and coordinates of the experts' changes of one weight (O I each)."""

    def refined(self, name: str, merged_KL: Tensor) -> Tensor:
        """The merged coordinates of a weight, as they are carried back."""
        return merged_KL

    def merge(
        self,
        models: Models,
        data: CalibrationData | None,
        sink: CheckpointSink,
        *,
        progress: Progress = silent,
    ) -> MergeNotes:
        from merging.contracts.vectors import row_blocks
        from merging.low_rank_changes import LowRankChanges, write_vector

        changes = LowRankChanges(models, self.name)
        groups = [list(changes.matrices)] if self.together else [[name] for name in changes.matrices]
        total, done = sum(models.base.spec(name).bytes for name in models.base.names()), 0

        def told(names: Sequence[str]) -> None:
            nonlocal done
            done += sum(models.base.spec(name).bytes for name in names)
            progress("merge", done, total)

        def inside(stage: str, done: int, total: int) -> None:
            progress(f"{stage} coordinates", done, total)

        for names in groups if changes.matrices else ():
            self._merge_matrices(names, changes, models, sink, inside if self.together else silent)
            told(names)
        for name in models.base.names():
            if name in changes.matrices:
                continue
            settings = self.settings_for(name)
            if name in changes.vectors and settings.others == "mean":
                write_vector(name, models, sink, settings.scale)
            else:
                for rows in row_blocks(models.base.spec(name)):
                    sink.write(name, models.base.read(name, rows), rows)
            told([name])
        return MergeNotes()

    def _merge_matrices(
        self, names: Sequence[str], changes: Any, models: Models, sink: CheckpointSink, progress: Progress
    ) -> None:
        from merging.coordinates import Coordinates, Returning

        def write(name: str, merged_KL: Tensor) -> None:
            delta_S = changes.laid_out(name, spaces.space(name).back(self.refined(name, merged_KL.double())))
            scale = self.settings_for(name).scale
            sink.write(name, models.base.read(name).double() + scale * delta_S)

        spaces = Coordinates(names, models, lambda name: self.space(changes.terms(name)))
        inner = find_class("strategies", self.settings.inner.type)(
            self.settings.inner.settings, seed=self.seed
        )
        with Returning(spaces.base, write) as returning:
            inner.merge(spaces.models, None, returning, progress=progress)
