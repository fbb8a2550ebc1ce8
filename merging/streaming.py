"""StreamedModel: a model whose weights are there only while they are wanted."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from merging.checkpoints.computed import computed_weights
from merging.checkpoints.parts import Parts
from merging.checkpoints.source import CheckpointSource
from merging.contracts.backbone import Backbone
from merging.errors import CheckpointError
from merging.lean import lean_


class StreamedModel:
    """The backbone's skeleton, filled from a checkpoint part by part and emptied again.

    Weights are cast to `dtype` when loaded; buffers that the checkpoint does not store keep their computed
    values, and so do parameters that the class computes and does not store."""

    def __init__(
        self,
        backbone: Backbone,
        names: Iterable[str],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`names`: what the checkpoints of this run call their tensors."""
        self.module = backbone.skeleton()
        self._device, self._dtype = torch.device(device), dtype
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(self._device)
        names = tuple(names)
        self.parts = Parts(backbone.parts(names))
        self.stored: dict[str, str] = {}  # name in the module -> name in the checkpoint, or of a part there
        for stored, inside in backbone.module_names(self.parts.names(names)).items():
            self.stored.setdefault(inside, stored)
        self.inside = {stored: inside for inside, stored in self.stored.items()}
        self.ties = {  # name in the module -> the name whose tensor it shares
            target: source for target, source in _ties(self.module).items() if target not in self.stored
        }
        self._source: CheckpointSource | None = None
        self._loaded: set[str] = set()
        present = dict(self.module.named_parameters(remove_duplicate=False))
        lost = [
            name for name in present if name not in self.stored and self.ties.get(name) not in self.stored
        ]
        for name, made in computed_weights(self.module, lost).items():
            lost.remove(name)
            owner, leaf = _owner(self.module, name)
            placed = made.to(self._device, self._dtype)
            owner._parameters[leaf] = nn.Parameter(placed, requires_grad=False)
        if lost:
            raise CheckpointError(
                f"{len(lost)} of {len(present)} parameters of {type(self.module).__name__} are not in the "
                f"checkpoint; first: {lost[0]}",
                remedy="Config and weights do not belong together, or the model makes these of several "
                "stored tensors: then only methods that need no data can merge it.",
            )

    def attach(self, source: CheckpointSource) -> None:
        """Take weights from `source` from now on; what was loaded is dropped."""
        self.release()
        self._source = self.parts.source(source)

    def load(self, prefix: str = "", *, without: Iterable[str] = ()) -> None:
        """Fill all parameters and stored buffers under `prefix`, but for those under any of `without`."""
        skipped = tuple(f"{part}." for part in without)
        for name in list(self.stored):
            if _under(name, prefix) and not name.startswith(skipped or ("\0",)) and name not in self._loaded:
                self._assign(name, self.read(name))
        for target, source in self.ties.items():
            if source in self._loaded:
                owner, leaf = _owner(self.module, target)
                origin, origin_leaf = _owner(self.module, source)
                owner._parameters[leaf] = origin._parameters[origin_leaf]

    def release(self, prefix: str = "") -> None:
        """Empty what lies under `prefix`: parameters go back to the meta device."""
        for name in [name for name in self._loaded if _under(name, prefix)]:
            owner, leaf = _owner(self.module, name)
            parameter = owner._parameters.get(leaf)
            if parameter is not None:
                owner._parameters[leaf] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            self._loaded.discard(name)

    def read(self, name: str) -> Tensor:
        """A parameter by its name in the module, from the checkpoint, in the dtype of computation."""
        if self._source is None:
            raise ValueError("attach a source first")
        tensor = self._source.read(self.stored[name])
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else tensor.dtype)

    def write_(self, name: str, tensor: Tensor) -> None:
        """Replace a loaded parameter's values in place of those from the checkpoint, until it is released."""
        self._assign(name, tensor.to(self._device, self._dtype))

    def _assign(self, name: str, tensor: Tensor) -> None:
        owner, leaf = _owner(self.module, name)
        place: Tensor | None = owner._parameters.get(leaf, owner._buffers.get(leaf))
        if place is None:
            raise CheckpointError(f'{type(self.module).__name__} has no tensor "{name}"')
        if place.shape != tensor.shape:
            raise CheckpointError(
                f'"{name}" has shape {tuple(tensor.shape)} in the checkpoint, by the config it has '
                f"{tuple(place.shape)}"
            )
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[leaf] = tensor
        self._loaded.add(name)


def load_model(
    backbone: Backbone,
    source: CheckpointSource,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The whole model of a checkpoint, in eval mode."""
    model = StreamedModel(backbone, source.names(), device=device, dtype=dtype)
    model.attach(source)
    model.load()
    return lean_(model.module)


def _under(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _ties(model: nn.Module) -> dict[str, str]:
    """Parameter name -> the parameter whose tensor it shares, as the model class declares or as the module
    shows."""
    declared = getattr(model, "all_tied_weights_keys", None)
    ties = dict(declared) if declared else {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties.setdefault(name, first[id(parameter)])
    return ties
