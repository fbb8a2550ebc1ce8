"""Fisher merging: a mean in which each weight counts by how much its expert's predictions hang on it.

Shape letters: N experts, S the shape of a parameter, B examples, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from merging.contracts.merger import MergeNotes, Merger
from merging.contracts.method import Progress, silent
from merging.errors import DataError, RuleError
from merging.layerwise import Placed
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor

    from merging.checkpoints.sink import CheckpointSink
    from merging.contracts.models import Models
    from merging.data.task import CalibrationData
    from merging.functional import FunctionalModel
    from merging.records import Records


class Fisher(Placed, Merger):
    """The mean of the experts, each weight by its expert's diagonal Fisher information.

    W = sum_i c_i F_i W_i / sum_i c_i F_i entry by entry, F_i = E_x E_{y ~ p_i(y|x)} (d log p_i(y|x) / dW)^2
    on calibration examples without labels, c_i = w_i / |F_i|. Matena and Raffel, 2022.
    """

    paper = "arXiv:2111.09832"
    needs = frozenset({"data", "gradients", "heads"})
    memory = (
        "3 times one expert in float32 (weights, sums, a gradient) and the activations of one example; "
        "the N Fishers in float32, 256 MiB of them in memory, the rest on disk"
    )
    weighted = True

    class Settings(BaseSettings):
        estimate: Literal["exact", "batch"] = Field(
            "exact",
            description="Per example, the expectation over the model's own classes; or per batch, as the "
            "published PyTorch ports do, which leaves cross terms in.",
        )
        normalize: bool = Field(
            True, description="Divide each expert's Fisher by its L2 norm over all merged parameters."
        )
        floor: float = Field(
            1e-6, ge=1e-30, le=1e6, description="Least weight of an entry, before normalising."
        )
        floor_by: Literal["max", "add"] = Field(
            "max", description="Entries below the floor are raised to it; or it is added to all."
        )
        target: str | None = Field(
            None,
            description="The expert that alone gets the floor (favor_target_model in the authors' code); "
            "if not given, all do.",
        )

    @classmethod
    def check(cls, settings: Any, weights: Mapping[str, float]) -> list[str]:
        problems = []
        if any(weight < 0 for weight in weights.values()) or (weights and not any(weights.values())):
            problems.append("fisher takes a mean, so no weight may be negative and one must be positive")
        if settings.target is not None and weights and settings.target not in weights:
            problems.append(
                f'target: there is no expert "{settings.target}"; there are: {", ".join(weights)}'
            )
        return problems

    def merge(
        self,
        models: Models,
        data: CalibrationData | None,
        sink: CheckpointSink,
        *,
        progress: Progress = silent,
    ) -> MergeNotes:
        from merging.records import Records

        if models.backbone is None:
            raise RuleError("fisher has to run the experts, and their architecture is not known")
        if data is None:
            raise DataError('strategy "fisher" needs calibration examples and a head for each expert')
        data.require(models.tasks, heads=True)
        fishers = Records(self.work, memory=self.limits.activation_memory)
        try:
            norms = self._estimate(models, data, fishers, progress)
            return self._write(models, fishers, norms, sink, progress)
        finally:
            fishers.close()

    def _estimate(
        self, models: Models, data: CalibrationData, fishers: Records, progress: Progress
    ) -> dict[str, float]:
        """Fill `fishers`, one expert after the other; each one's L2 norm."""
        from merging.functional import FunctionalModel

        assert models.backbone is not None
        model = FunctionalModel(models.backbone, models.base.names(), **self.computing())
        norms = {}
        for task in models.tasks:
            square = 0.0
            for name, fisher_S in self._of_expert(model, models, data, task, progress).items():
                square += float(fisher_S.double().square().sum())
                fishers.put((task, name), fisher_S.cpu())
            norms[task] = square**0.5
        return norms

    def _of_expert(
        self, model: FunctionalModel, models: Models, data: CalibrationData, task: str, progress: Progress
    ) -> dict[str, Tensor]:
        import torch

        from merging.fisher_information import DiagonalFisher

        expert = models.experts[task]
        weights = {
            name: model.placed((models.base if name in models.kept else expert).read(name))
            for name in model.names
        }
        leaves = {name: weights[name].detach().clone() for name in _merged(models) if name in weights}
        for leaf_S in leaves.values():
            leaf_S.requires_grad_()
        weights |= leaves
        fisher, examples, done = DiagonalFisher(leaves), data[task], 0
        with torch.enable_grad():
            for batch in examples.batches():
                size = len(next(iter(batch.values())))
                step = 1 if self.settings.estimate == "exact" else size
                for start in range(0, size, step):
                    part = {name: value[start : start + step] for name, value in batch.items()}
                    scores_BC = model.scores(weights, part, data.heads[task], task=task)
                    if step == 1 and self.settings.estimate == "exact":
                        fisher.add_example(scores_BC[0])
                    else:
                        fisher.add_batch(scores_BC)
                    done += step
                    progress(f'Fisher information of expert "{task}"', done, len(examples))
        return fisher.mean()

    def _write(
        self,
        models: Models,
        fishers: Records,
        norms: Mapping[str, float],
        sink: CheckpointSink,
        progress: Progress,
    ) -> MergeNotes:
        import torch

        from merging.fisher_information import fisher_mean, floored

        settings, experts = self.settings, sorted(models.tasks)
        weights_N = torch.tensor([models.weights[task] for task in experts], dtype=torch.float64)
        if settings.normalize:
            norms_N = torch.tensor([norms[task] for task in experts], dtype=torch.float64)
            weights_N = weights_N / floored(norms_N, settings.floor, settings.floor_by)
        only = experts.index(settings.target) if settings.target is not None else None
        merged, left = set(_merged(models)), {}
        total, done = sum(models.base.spec(name).bytes for name in models.base.names()), 0
        for name in models.base.names():
            if name in merged:
                experts_NS = torch.stack([models.experts[task].read(name).double() for task in experts])
                if (experts[0], name) in fishers:
                    fishers_NS = torch.stack([fishers.get((task, name)).double() for task in experts])
                else:
                    fishers_NS = torch.zeros_like(experts_NS)
                    left[name] = "the model does not use it; the weighted mean of the experts"
                mean_S = fisher_mean(
                    experts_NS, fishers_NS, weights_N, floor=settings.floor, by=settings.floor_by, only=only
                )
                sink.write(name, mean_S)
            else:
                sink.write(name, models.base.read(name))
            done += models.base.spec(name).bytes
            progress("merge", done, total)
        return MergeNotes(fisher_norms=dict(norms), left=left)


def _merged(models: Models) -> list[str]:
    """Names of the tensors that are merged."""
    return [
        name
        for name in models.base.names()
        if models.base.spec(name).dtype.is_floating_point and name not in models.kept
    ]
