"""AdaMerging: coefficients of the task vectors, learned without labels.

Shape letters: L rows of coefficients, N experts, S the shape of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import Field

from merging.contracts.merger import MergeNotes, Merger
from merging.contracts.method import Progress, silent
from merging.errors import DataError, RuleError
from merging.layerwise import Placed
from merging.settings import Rate, Scale, Steps
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor

    from merging.checkpoints.sink import CheckpointSink
    from merging.contracts.backbone import Batch
    from merging.contracts.models import Models
    from merging.contracts.vectors import TaskVectors
    from merging.data.task import CalibrationData
    from merging.entropy_descent import DescentStep, Loss

ALL = "all tensors"
Drawn: TypeAlias = "list[tuple[str, Batch]]"
"""Tasks and batches of one step."""


class AdaMerging(Placed, Merger):
    """Task arithmetic whose coefficients are learned by making the merged model's predictions surer.

    W_l = W_0l + sum_i c_li T_li, one c per expert and tensor l (or one per expert); Adam makes the sum over
    tasks of the mean entropy of softmax(head(features)) small on unlabelled examples. Yang et al., 2024.
    Departs from the paper in learning on calibration examples: the authors take the inputs of the test set.
    """

    paper = "arXiv:2310.02575"
    needs = frozenset({"base", "data", "gradients", "heads"})
    memory = (
        "N + 3 times the model in float32 (base, task vectors, merged, gradient), and one batch's activations"
    )

    class Settings(BaseSettings):
        granularity: Literal["layer", "task"] = Field(
            "layer",
            description="One coefficient per expert and tensor (layer-wise), or one per expert (task-wise).",
        )
        plus_plus: bool = Field(
            False,
            description="AdaMerging++: first reduce each task vector to what TIES keeps of it after trim and "
            "election of signs.",
        )
        density: float = Field(
            0.2, gt=0, le=1, description="Share of entries that the trim keeps (k), with `plus_plus`."
        )
        initial: Scale = Field(0.3, description="What all coefficients start from (lambda).")
        clamp: bool = Field(True, description="Use coefficients between 0 and 1 only.")
        learning_rate: Rate = Field(1e-3, description="Of Adam.")
        steps: Steps = Field(500, description="Steps of Adam.")
        batches: Steps = Field(
            2, description="Batches per task and step, drawn from the calibration source's."
        )
        patience: Steps | None = Field(
            None, description="Stop after so many steps without a new lowest loss; if not given, never."
        )

    def merge(
        self,
        models: Models,
        data: CalibrationData | None,
        sink: CheckpointSink,
        *,
        progress: Progress = silent,
    ) -> MergeNotes:
        import torch

        from merging.contracts.vectors import TaskVectors

        if models.backbone is None:
            raise RuleError("ada_merging has to run the merged model, and its architecture is not known")
        if data is None:
            raise DataError('strategy "ada_merging" needs calibration examples and a head for each expert')
        data.require(models.tasks, heads=True)
        vectors = TaskVectors(models, torch.float64, blocked=False, progress=progress)
        change = _selection(vectors, self.settings.density) if self.settings.plus_plus else _unchanged
        rows = self.rows(vectors)
        steps = self._learned(models, data, vectors, change, rows, progress)
        coefficients_LN = steps[-1].coefficients_LN.double()
        total, done = sum(models.base.spec(name).bytes for name in models.base.names()), 0
        for name in models.base.names():
            if name in rows:
                base_S, deltas_NS = vectors.read(name)
                merged_S = torch.tensordot(coefficients_LN[rows[name]], change(deltas_NS), dims=1)
                sink.write(name, base_S + merged_S)
            else:
                sink.write(name, models.base.read(name))
            done += models.base.spec(name).bytes
            progress("merge", done, total)
        labels = list(rows) if self.settings.granularity == "layer" else [ALL]
        return MergeNotes(
            coefficients={
                label: dict(zip(vectors.experts, row, strict=True))
                for label, row in zip(labels, coefficients_LN.tolist(), strict=True)
            },
            losses=[step.loss for step in steps],
        )

    def rows(self, vectors: TaskVectors) -> dict[str, int]:
        """Merged tensor -> its row of coefficients."""
        return {
            name: place if self.settings.granularity == "layer" else 0
            for place, name in enumerate(vectors.names)
        }

    def _learned(
        self,
        models: Models,
        data: CalibrationData,
        vectors: TaskVectors,
        change: Callable[[Tensor], Tensor],
        rows: dict[str, int],
        progress: Progress,
    ) -> list[DescentStep]:
        """Every step that was made; at least one."""
        import torch

        from merging.entropy_descent import MergedModel, descend, entropy
        from merging.functional import FunctionalModel

        assert models.backbone is not None
        settings = self.settings
        model = FunctionalModel(models.backbone, models.base.names(), **self.computing())
        fixed = {name: model.placed(models.base.read(name)) for name in model.names if name not in rows}
        base, deltas = {}, {}
        for name in model.names:
            if name in rows:
                base_S, deltas_NS = vectors.read(name)
                base[name], deltas[name] = model.placed(base_S), model.placed(change(deltas_NS))
        merged, batches = (
            MergedModel(fixed, base, deltas, rows),
            _drawn(data, models, settings.batches, self.seed),
        )

        def loss_on(task: str, batch: Batch) -> Loss:
            return lambda weights: entropy(model.scores(weights, batch, data.heads[task], task=task))

        def losses() -> Iterator[Loss]:
            return (loss_on(task, batch) for task, batch in next(batches))

        start_LN = torch.full((max(rows.values(), default=0) + 1, len(vectors.experts)), settings.initial)
        steps: list[DescentStep] = []
        lowest, since = float("inf"), 0
        for step in descend(
            start_LN,
            lambda values_LN: merged.gradient(values_LN, losses()),
            steps=settings.steps,
            learning_rate=settings.learning_rate,
            clamp=settings.clamp,
        ):
            steps.append(step)
            progress("learn coefficients", len(steps), settings.steps)
            lowest, since = (step.loss, 0) if step.loss < lowest else (lowest, since + 1)
            if settings.patience is not None and since >= settings.patience:
                break
        return steps


def _drawn(data: CalibrationData, models: Models, count: int, seed: int) -> Iterator[Drawn]:
    """For each step, (task, batch) pairs: of each task the first `count` batches of a new permutation."""
    import torch

    from merging.data.draw import generator

    sources = {task: data[task].batches() for task in sorted(models.tasks)}
    random = {task: generator(seed, task, "ada_merging") for task in sources}
    while True:
        yield [
            (task, batches[place])
            for task, batches in sources.items()
            for place in torch.randperm(len(batches), generator=random[task])[:count].tolist()
        ]


def _selection(vectors: TaskVectors, density: float) -> Callable[[Tensor], Tensor]:
    """What TIES keeps of each task vector: its largest entries, as far as they have the elected sign."""
    import torch

    from merging.task_vectors import Majority, agreeing, balance, elect_by_mass, trim
    from merging.thresholds import magnitude_thresholds

    thresholds_N = magnitude_thresholds(vectors, density)
    ones_N = torch.ones(len(thresholds_N), dtype=torch.float64)
    majority = Majority(vectors, lambda _, deltas_NS: balance(deltas_NS, thresholds_N, ones_N)).sign()

    def selected(deltas_NS: Tensor) -> Tensor:
        trimmed_NS = trim(deltas_NS, thresholds_N)
        sign_S = elect_by_mass(trimmed_NS)
        return agreeing(trimmed_NS, sign_S.where(sign_S != 0, majority))

    return selected


def _unchanged(deltas_NS: Tensor) -> Tensor:
    return deltas_NS
