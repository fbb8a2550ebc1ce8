"""FunctionalModel: a model as a function of its weights, so that gradients with respect to them can be taken.

Shape letters: B examples, C classes, F final feature.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.func import functional_call

from merging.contracts.backbone import Backbone, Batch
from merging.data.heads import refuse_misfit
from merging.data.task import Head
from merging.errors import NumericalError
from merging.streaming import StreamedModel


class FunctionalModel:
    """The backbone's model in eval mode. Weights go by the checkpoint's names; it reads those in `names`."""

    def __init__(
        self,
        backbone: Backbone,
        names: Iterable[str],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`names`: what the checkpoints of this run call their tensors."""
        model = StreamedModel(backbone, names, device=device, dtype=dtype)
        self._backbone, self._module, self._ties = backbone, model.module.eval(), model.ties
        self._device, self._dtype = torch.device(device), dtype
        present = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        present |= {name for name, _ in self._module.named_buffers(remove_duplicate=False)}
        self._parts = model.parts
        self._stored = {inside: stored for inside, stored in model.stored.items() if inside in present}
        self.names = tuple(dict.fromkeys(map(self._parts.whole, self._stored.values())))

    def placed(self, tensor: Tensor) -> Tensor:
        """On the model's device; in the dtype of computation if it is floating."""
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else tensor.dtype)

    def features(self, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """What heads read (B F). `weights`: all of `names`."""
        inside = {name: self._parts.read(weights, stored) for name, stored in self._stored.items()}
        inside |= {target: inside[source] for target, source in self._ties.items() if source in inside}
        batch = {name: self.placed(value) for name, value in batch.items()}
        # Both names of a tied tensor are given, and torch's own tying would refuse that.
        kwargs = self._backbone.forward_kwargs(batch)
        output = functional_call(self._module, inside, (), kwargs, tie_weights=False)
        return self._backbone.features(output, batch)

    def scores(self, weights: Mapping[str, Tensor], batch: Batch, head: Head, *, task: str) -> Tensor:
        """Scores of the task's classes (B C). Raises NumericalError where they are not finite."""
        features_BF = self.features(weights, batch)
        refuse_misfit(task, head, features_BF.shape[-1])
        scores_BC = head(features_BF)
        if not bool(torch.isfinite(scores_BC).all()):
            raise NumericalError(f'scores of the classes of task "{task}" are NaN or infinite')
        return scores_BC
