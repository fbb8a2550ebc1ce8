"""Opened: what a run works on, all under the base's names; and how one model of it is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from merging.checkpoints.folder import open_checkpoint
from merging.checkpoints.hub import ResolvedModel, resolve
from merging.checkpoints.lora_places import Placement
from merging.checkpoints.lora_roles import outline_of
from merging.checkpoints.misfits import listed
from merging.checkpoints.outline import Outline
from merging.checkpoints.parts import as_seen
from merging.checkpoints.prepared import PreparedFolder
from merging.checkpoints.side_files import refuse_unfit_side_files, side_files
from merging.checkpoints.sink import CheckpointSink
from merging.checkpoints.source import CheckpointSource
from merging.components import calibrators, strategies
from merging.contracts.backbone import Backbone
from merging.contracts.method import Method
from merging.contracts.models import Models
from merging.errors import SpecError
from merging.layer_settings import LayerSettings
from merging.output_heads import only_heads_read
from merging.preflight import (
    Finding,
)
from merging.spec import PipelineSpec
from merging.vocabulary import Matched
from merging.working_folder import working_folder


@dataclass(frozen=True)
class Input:
    """One model that a run reads: where it came from, and the files that are read."""

    name: str  # as the spec gives it
    path: Path
    files: tuple[Path, ...]
    hub: bool = False
    revision: str | None = None

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def named(self) -> dict[str, Path]:
        """The files by their names in the folder; those outside of it by their whole paths."""
        folder = self.folder
        return {
            file.relative_to(folder).as_posix() if file.is_relative_to(folder) else str(file): file
            for file in self.files
        }


@dataclass(frozen=True)
class Opened:
    """Everything that a run works on."""

    base_folder: Path
    models: Models
    inputs: Mapping[str, Input]  # "base", "expert NAME", "merged"
    heads: Mapping[str, Mapping[str, Tensor]] = field(
        default_factory=dict
    )  # the experts' own, read when asked for
    merged: CheckpointSource | None = None  # for the strategy `checkpoint`
    notes: tuple[str, ...] = ()
    vocabulary: Matched | None = None
    prepared: PreparedFolder | None = None  # side files that differ from the base's
    findings: tuple[Finding, ...] = ()  # of configs; whoever checks the run says which stop it
    known: Outline | None = None  # what `outline` says, where results are adapters
    placements: Mapping[str, Placement] = field(default_factory=dict)  # of the experts that are adapters
    by_headers: bool = True  # whether all of this is known from configs and headers, and not by values

    @property
    def side_files(self) -> Path:
        """Where config, tokenizer and processor of the result lie."""
        return self.base_folder if self.prepared is None else self.prepared.path

    def outline(self) -> Outline:
        """Of the base's model class. Raises SpecError where there is none to write an adapter for."""
        return self.known or outline_of(self.base_folder, self.models.base.names())

    def pinned(self, sink: CheckpointSink) -> CheckpointSink:
        """The sink to write to: tokens' rows that no rule may touch stay what they are."""
        return sink if self.vocabulary is None else self.vocabulary.pinned(sink)


def open_named(model: str, revision: str | None, label: str) -> tuple[ResolvedModel, CheckpointSource]:
    place = resolve(model, revision=revision, folder=working_folder(needed=False))
    return place, open_checkpoint(place.path, label)


def input_of(name: str, place: ResolvedModel, source: CheckpointSource, *, copied: bool = False) -> Input:
    """`copied`: what lies beside the weights goes into the result, and is read too."""
    folder = place.path if place.path.is_dir() else place.path.parent
    names = side_files(place.path).known if copied and place.path.is_dir() else ()
    beside = [folder / name for name in dict.fromkeys((*names, "config.json"))]
    files = dict.fromkeys((*source.files, *(file for file in beside if file.is_file())))
    return Input(name, place.path, tuple(files), place.repo_id is not None, place.revision)


class HeadTensors(Mapping[str, Tensor]):
    """The tensors of an expert's heads, read when asked for."""

    def __init__(self, source: CheckpointSource, is_head: Callable[[str], bool]) -> None:
        self._source = source
        self._names = tuple(name for name in source.names() if is_head(name))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._source.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def methods_of(spec: PipelineSpec) -> dict[str, type[Method]]:
    """What the spec asks for, by how an error names it."""
    return {
        f'strategy "{spec.merge.type}"': strategies.get(spec.merge.type),
        **{f'calibrator "{one.type}"': calibrators.get(one.type) for one in spec.calibrate},
    }


def walks_models(spec: PipelineSpec) -> bool:
    """Whether some method runs models, for which weights must be those of the model class."""
    return any("data" in method.needs for method in methods_of(spec).values())


def fed_by_base(spec: PipelineSpec) -> set[str]:
    """Experts, by label, of whom examples are made by the base's image processor or tokenizer."""
    sources = {task: (one.calibration, one.validation, one.test) for task, one in spec.tasks.items()}
    return {
        f'expert "{task}"'
        for task, given in sources.items()
        if any(source is not None and source.type != "tensors" for source in given)
    }


def read_by_heads(
    spec: PipelineSpec,
    base: Path,
    experts: Iterable[Path],
    backbone: Backbone | None,
    output: frozenset[str] = frozenset(),
) -> list[str]:
    """Where all experts have heads of their own, the base's is not walked; the note that says so."""
    if backbone is None or not only_heads_read(spec, base, experts):
        return []
    backbone.read_by_heads()
    if not output:
        return []
    named = listed(sorted(output))
    return [f"no expert has the base's output head, which is not run and stays as it is ({named})"]


def refuse_side_files(spec: PipelineSpec, folder: Path) -> None:
    """Before anything reads them, and before an output folder is made; an adapter gets none of them."""
    if spec.output.form != "lora" and folder.is_dir():
        refuse_unfit_side_files(folder)


def refuse_layers(spec: PipelineSpec, models: Models) -> None:
    seen = as_seen(models, strategies.get(spec.merge.type))
    if unfit := LayerSettings(spec.merge.layers).problems(seen, spec.merge.settings):
        raise SpecError("merge.layers does not fit the model", problems=unfit)
