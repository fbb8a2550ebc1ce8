"""LoraSource: a base with a PEFT LoRA on it, seen as a full checkpoint; a tensor is computed when it is read.

Shape letters: O rows, I columns (all axes but the first, flattened), R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from merging.checkpoints.folder import missing, refuse_unfinished
from merging.checkpoints.lora_config import CONFIG, LoraConfig, read_config
from merging.checkpoints.lora_keys import sorted_keys
from merging.checkpoints.lora_places import Change, Placement, placed
from merging.checkpoints.outline import Outline
from merging.checkpoints.quantised import refuse_quantised
from merging.checkpoints.safetensors import SafetensorsSource
from merging.checkpoints.source import CheckpointSource, TensorSpec
from merging.checkpoints.torch_bin import TorchBinSource
from merging.checkpoints.weight_files import refuse_dangling, refuse_outside
from merging.errors import CheckpointError
from merging.low_rank import LowRank, zero
from merging.spec.wording import shortened

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def is_adapter(path: Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (path / CONFIG).is_file() and any((path / name).is_file() for name in WEIGHTS)


def open_adapter(
    path: Path,
    base: CheckpointSource,
    model: nn.Module | Outline | None,
    label: str = "",
    *,
    base_name: str = "",
    base_folder: Path | None = None,
) -> LoraSource:
    """The base with the adapter of that folder. Headers are read and all names and shapes compared, no data.

    `model`: the base's skeleton, by which names are matched; without it they must be the base's own.
    `base_name`: what the user calls the base. Raises CheckpointError.
    """
    files = AdapterFiles.of(path, label or str(path))
    source = files.on(base, model=model)
    if note := _other_base(files.config.base_model_name_or_path, base_name, base_folder, source.label):
        source.notes += (note,)
    return source


@dataclass(frozen=True)
class AdapterFiles:
    """A folder's adapter, of which headers are read."""

    folder: Path
    label: str
    config: LoraConfig
    tensors: CheckpointSource

    @classmethod
    def of(cls, path: Path, label: str) -> AdapterFiles:
        """Raises CheckpointError for what is no adapter, or none that is read."""
        return _adapter_files(path, label)

    def on(
        self,
        base: CheckpointSource,
        *,
        model: nn.Module | Outline | None = None,
        placement: Placement | None = None,
    ) -> LoraSource:
        """The base with this adapter on it. `placement`: what was found before of just these files."""
        source = LoraSource(
            base, self.tensors, self.config, model=model, label=self.label, placement=placement
        )
        source.files = (*self.tensors.files, self.folder / CONFIG)
        return source


def _adapter_files(path: Path, label: str) -> AdapterFiles:
    if not path.exists():
        raise missing(path)
    refuse_unfinished(path)
    folder = path if path.is_dir() else path.parent
    refuse_dangling(folder / CONFIG)
    config = read_config(folder, label)
    for name in WEIGHTS:
        refuse_dangling(folder / name)
    file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{folder} holds no adapter's weights: neither {' nor '.join(WEIGHTS)}")
    refuse_outside(folder, file)
    refuse_outside(folder, folder / CONFIG)
    tensors: CheckpointSource
    tensors = SafetensorsSource(file, label) if file.suffix == ".safetensors" else TorchBinSource(file, label)
    if not tensors.names():
        raise CheckpointError(
            f"{label}: {file} holds no tensors, expected an adapter's factors",
            remedy="Save the adapter again with PEFT's save_pretrained, or get it again.",
        )
    refuse_quantised(tensors, None)
    return AdapterFiles(folder, label, config, tensors)


class LoraSource(CheckpointSource):
    """The base's tensors, changed as PEFT's merge_and_unload changes them, and heads that the adapter brings.

    What the adapter changes is read in float64: it is rounded where it is stored, not before. `spec` has the
    dtype in which the base stores it.
    """

    def __init__(
        self,
        base: CheckpointSource,
        tensors: CheckpointSource,
        config: LoraConfig,
        *,
        model: nn.Module | Outline | None = None,
        label: str = "adapter",
        placement: Placement | None = None,
    ) -> None:
        """`tensors`: what the adapter's file holds, under its names. Raises CheckpointError for misfits."""
        self.label, self.files = label, tensors.files
        self._base, self._tensors = base, tensors
        if placement is None:
            placement = placed(base, tensors, sorted_keys(tensors.names(), label), config, model)
        self.placement = placement
        self._changes, self._whole = placement.changes, placement.whole
        self.notes = (*tensors.notes, *placement.notes)
        self._stored = frozenset(base.names())
        self._latest: tuple[str, LowRank] | None = None
        self._of_columns: dict[str, Tensor] = {}

    def names(self) -> tuple[str, ...]:
        return (*self._base.names(), *(name for name in self._whole if name not in self._stored))

    def spec(self, name: str) -> TensorSpec:
        if name not in self._whole:
            return self._base.spec(name)
        found = self._tensors.spec(self._whole[name])
        return TensorSpec(found.shape, self._base.spec(name).dtype) if name in self._stored else found

    def shard(self, name: str) -> str | None:
        return self._base.shard(name) if name in self._stored else None

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        change = self._changes.get(name)
        if change is not None and change.magnitude and not change.bias:
            return self._rescaled(name, change, rows)
        start = self._start(name, rows)
        if change is None:
            return start
        if change.bias:
            shift_O = self._tensors.read(change.bias, rows).double()
            return start.double() + change.scale * shift_O
        return start.double() + self._factors(name, change).product(rows).view(start.shape)

    def factors(self, name: str) -> LowRank | None:
        """What the adapter adds, exactly: rank 0 where nothing changes, None where it does more than add."""
        change = self._changes.get(name)
        if name in self._whole:
            kept = name in self._stored and self._same_as_base(name)
            if not kept:
                return None
        if change is None:
            spec = self._base.spec(name)
            rows = spec.shape[0] if spec.shape else 1
            return zero(rows, spec.elements // max(1, rows))
        return None if change.bias or change.magnitude else self._factors(name, change)

    def _start(self, name: str, rows: slice | None) -> Tensor:
        """The tensor before B A is added: the base's, or one that the adapter stores whole."""
        whole = self._whole.get(name)
        return self._base.read(name, rows) if whole is None else self._tensors.read(whole, rows)

    def _factors(self, name: str, change: Change) -> LowRank:
        latest = self._latest  # another thread may replace it
        if latest is not None and latest[0] == name:
            return latest[1]
        first_RI = self._tensors.read(change.first).flatten(1)
        second_OR = self._tensors.read(change.second).flatten(1)
        found = LowRank(second_OR, first_RI, change.scale)
        if change.transposed:
            found = LowRank(first_RI.T, second_OR.T, change.scale)
        self._latest = (name, found)
        return found

    def _rescaled(self, name: str, change: Change, rows: slice | None) -> Tensor:
        """DoRA: each output's weights, as LoRA leaves them, are brought to the length that was learnt."""
        changed = self._changed(name, change, rows)
        if change.transposed:
            return changed * self._scales_of_columns(name, change)
        lengths = self._tensors.read(change.magnitude, rows).double()
        return changed * (lengths / changed.norm(dim=1))[:, None]

    def _scales_of_columns(self, name: str, change: Change) -> Tensor:
        """Where an output is a column, its length takes all rows: asked once, for all blocks."""
        if name not in self._of_columns:
            lengths = self._tensors.read(change.magnitude).double()
            self._of_columns[name] = lengths / self._changed(name, change, None).norm(dim=0)
        return self._of_columns[name]

    def _changed(self, name: str, change: Change, rows: slice | None) -> Tensor:
        return self._start(name, rows).double() + self._factors(name, change).product(rows)

    def _same_as_base(self, name: str) -> bool:
        """PEFT stores some layers whole beside their factors, mostly unchanged."""
        stored, base = self._tensors.read(self._whole[name]), self._base.read(name)
        return stored.shape == base.shape and torch.equal(stored.double(), base.double())


def _other_base(named: str | None, base: str, folder: Path | None, label: str) -> str:
    """A note where the adapter names another base. Copies of a hub's model keep its last name."""
    if not named or not base or named == base:
        return ""
    try:
        known = Path(named).exists()
    except (OSError, ValueError):  # longer than a path may be
        known = False
    if known and folder is not None and Path(named).resolve() == folder.resolve():
        return ""
    if not known and not Path(named).is_absolute() and Path(named).name.lower() == Path(base).name.lower():
        return ""
    return (
        f'{label} was trained on "{shortened(named)}" (base_model_name_or_path), the base of this run is '
        f'"{base}": unless these are the same weights, the result is wrong'
    )
