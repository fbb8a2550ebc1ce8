"""From a spec to opened models and tasks: headers are read, everything is compared, nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from merging.architecture import select_backbone, ties_head
from merging.backbones.pretrained import is_pooler
from merging.backbones.task_heads import head_of
from merging.checkpoints.alignment import Alignment, align
from merging.checkpoints.clip_layouts import mixed_libraries
from merging.checkpoints.folder import config as read_config
from merging.checkpoints.folder import open_checkpoint, open_clip_config
from merging.checkpoints.hub import ResolvedModel, resolve
from merging.checkpoints.lora import AdapterFiles, is_adapter, open_adapter
from merging.checkpoints.lora_places import Placement
from merging.checkpoints.lora_roles import outline_of
from merging.checkpoints.misfits import listed
from merging.checkpoints.names import NameMap, module_names
from merging.checkpoints.outline import Outline
from merging.checkpoints.parts import as_seen
from merging.checkpoints.prepared import PreparedFolder
from merging.checkpoints.quantised import QUANTISED_KEYS
from merging.checkpoints.side_files import refuse_unfit_side_files, side_files
from merging.checkpoints.sink import CheckpointSink
from merging.checkpoints.source import CheckpointSource, FilledSource
from merging.checkpoints.vocabulary_rows import vocabulary_axes
from merging.checkpoints.wrappers import unwrapped
from merging.components import calibrators, strategies
from merging.contracts.backbone import Backbone
from merging.contracts.method import Method
from merging.contracts.models import Models
from merging.errors import CheckpointError, MergingError, Problem, SpecError
from merging.layer_settings import LayerSettings
from merging.output_heads import has_own_head, lacks_output, only_heads_read, output_head
from merging.preflight import (
    Finding,
    config_findings,
    config_problems,
    processor_findings,
    refuse_unwalkable,
    running_statistics,
)
from merging.remembered import Findings, key_of, recall, remember
from merging.spec import PipelineSpec
from merging.vocabulary import Matched, match_vocabularies
from merging.vocabulary_comparison import Member
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


def open_models(spec: PipelineSpec) -> Opened:
    """Open base and experts and bring all tensors under the base's names.

    Raises CheckpointError that lists every tensor of every expert that does not fit.
    """
    plain = _Plain(spec) if _may_be_plain(spec) else None
    if plain is not None and (opened := plain.recalled()) is not None:
        return opened
    opened = _compared(spec)
    if plain is not None:
        plain.remember(opened)
    return opened


def _compared(spec: PipelineSpec) -> Opened:
    base_at, base = _opened(spec.base.model, spec.base.revision, "base")
    _refuse_unfit_side_files(spec, base_at.path)
    backbone = select_backbone(base_at.path, spec.backbone)
    model = backbone.skeleton() if backbone is not None else None
    base = unwrapped(base, model)
    base_head: Callable[[str], bool] = _no_head
    keeps: Callable[[str], bool] = _no_head
    if backbone is not None:
        base_head = _either(backbone.is_head, _task_head(base_at.path, base))
        keeps = _either(backbone.keeps, base_head)
    is_outer = backbone.is_outer if backbone is not None else _no_head
    names = module_names(model, base.names()) if model is not None else NameMap({})
    axes = vocabulary_axes(model, names, base)
    output = output_head(model, names)
    places: list[Path] = []
    members: dict[str, Member] = {}
    absent: dict[str, tuple[str, ...]] = {}
    inputs = {"base": _input(spec.base.model, base_at, base, copied=True)}
    heads: dict[str, Mapping[str, Tensor]] = {}
    placements: dict[str, Placement] = {}
    kept = {name for name in base.names() if keeps(name)}
    notes, problems = list(base.notes), []
    inside = backbone.module_names(base.names()) if backbone is not None else {}
    problems += config_problems(model, {name: at for name, at in inside.items() if not keeps(name)}, base)
    notes += backbone.remarks() if backbone is not None else ()
    if read_config(base_at.path) is None and open_clip_config(base_at.path) is None:
        notes.append(f"{base_at.path} has no config.json: from_pretrained will not open the results")
    for task, ref in spec.experts.items():
        label = f'expert "{task}"'
        try:
            if ref.adapter is None:
                place, source = _opened(ref.ref.model, ref.revision, label)
                source = unwrapped(source, model, base)
            else:
                place = resolve(ref.adapter, revision=ref.revision, folder=working_folder(needed=False))
                name = spec.base.model
                adapter = open_adapter(
                    place.path, base, model, label, base_name=name, base_folder=base_at.path
                )
                source, placements[task] = adapter, adapter.placement
        except MergingError as error:
            problems.append(Problem(f"experts.{task}", error.message, error.remedy))
            problems += error.problems
            continue
        if (mixed := mixed_libraries(base, source)) is not None:
            problems.append(mixed)
            continue
        at = place.path if ref.adapter is None else base_at.path
        is_head = _either(base_head, _task_head(at, source))
        if (pooler := _own_pooler(base, source, at)) is not _no_head:
            is_head = _either(is_head, pooler)
            notes.append(f"{label}: the base has no pooler, the expert's is kept as part of its head")
        elif not any(map(is_pooler, base.names())) and any(
            is_pooler(name) and keeps(name) for name in source.names()
        ):
            notes.append(f"{label}: the base has no pooler, the expert's is left out: heads read the tokens")
        places.append(place.path)
        outer = is_outer
        if lacks_output(place.path, base_at.path):
            kept |= output if has_own_head(place.path) else frozenset()
            outer = _either(is_outer, output.__contains__)
        fit = _aligned(base, source, model, _either(keeps, is_head), at, axes, outer)
        problems += fit.problems
        notes += [*source.notes, *fit.notes, *_without_config(label, place, base_at)]
        kept.update(fit.absent)
        absent[label] = fit.absent
        inputs[label] = _input(ref.ref.model, place, source)
        members[label] = Member(fit.source, place.path, ref.weight)
        heads[task] = _HeadTensors(source, is_head)
    if spec.merge.type == "checkpoint":
        settings: Any = spec.merge.settings
        place, source = _opened(settings.model, settings.revision, "merged model")
        source = unwrapped(source, model, base)
        fit = _aligned(base, source, model, keeps, place.path, axes, is_outer)
        problems += fit.problems
        inputs["merged"] = _input(settings.model, place, source)
        members["merged"] = Member(fit.source, place.path)
    notes += _read_by_heads(spec, base_at.path, places, backbone, output)
    vocabulary = match_vocabularies(spec.vocabulary, base, base_at.path, members, axes, walks=_walks(spec))
    problems += vocabulary.problems
    folders = {label: given.path for label, given in inputs.items() if label != "base"}
    findings = config_findings(base_at.path, folders)
    findings += processor_findings(base_at.path, folders, _fed(spec))
    if problems:
        problems += [
            one.problem.named(one.name, warning=not one.stops)
            for one in findings
            if one.name not in spec.allow
        ]
        who = "the experts do" if spec.experts else "the merged model does"
        raise CheckpointError(f"{who} not fit the base", problems=problems)
    notes += vocabulary.notes
    kept |= vocabulary.kept
    base, merged = vocabulary.base, vocabulary.experts.get("merged")
    experts = {
        task: FilledSource(vocabulary.experts[label], base, absent[label])
        for task, label in ((task, f'expert "{task}"') for task in spec.experts)
    }
    if spec.vocabulary is not None:
        inputs = {role: _with_files(given, vocabulary.files.get(role, ())) for role, given in inputs.items()}
    prepared = _prepared(base_at.path, vocabulary, backbone)
    refuse_unwalkable(backbone, base, base_at.path, _methods(spec))
    notes += running_statistics(base)
    weights = {task: spec.experts[task].weight for task in experts}
    models = Models(base, experts, weights, backbone, frozenset(kept))
    _refuse_layers(spec, models)
    known = outline_of(base_at.path, base.names()) if spec.output.form == "lora" else None
    return Opened(
        base_at.path,
        models,
        inputs,
        heads,
        merged,
        tuple(dict.fromkeys(notes)),
        vocabulary,
        prepared,
        tuple(findings),
        known,
        placements,
    )


def opens_plainly(spec: PipelineSpec) -> bool:
    """Whether these models were opened before, so that a run will not need the libraries that understand
    them."""
    return _may_be_plain(spec) and _Plain(spec).recalled() is not None


def _may_be_plain(spec: PipelineSpec) -> bool:
    """Whether full checkpoints are to be merged by their tensors alone."""
    return (
        not _walks(spec) and spec.merge.type != "checkpoint" and spec.vocabulary is None and not spec.plugins
    )


class _Plain:
    """Opens checkpoints that were opened before, without the libraries that understand them."""

    def __init__(self, spec: PipelineSpec) -> None:
        self._spec = spec
        self._base_at, self._base = _opened(spec.base.model, spec.base.revision, "base")
        self._key: str | None = None
        self._places: dict[str, ResolvedModel] = {}
        self._experts: dict[str, CheckpointSource] = {}  # whole checkpoints
        self._adapters: dict[str, AdapterFiles] = {}
        try:
            for task, ref in spec.experts.items():
                label = f'expert "{task}"'
                if ref.adapter is None:
                    self._places[task], self._experts[task] = _opened(ref.ref.model, ref.revision, label)
                    continue
                place = resolve(ref.adapter, revision=ref.revision, folder=working_folder(needed=False))
                self._places[task], self._adapters[task] = place, AdapterFiles.of(place.path, label)
        except MergingError:  # told, with all other problems, by whoever compares them
            return
        places = [self._base_at, *self._places.values()]
        asked = [list(spec.experts), spec.backbone.model_dump(mode="json"), spec.allow, spec.base.model]
        asked += [
            sorted(_fed(spec)),
            only_heads_read(spec, self._base_at.path, [one.path for one in places[1:]]),
        ]
        self._key = key_of(
            [*asked, sorted(self._adapters), spec.output.form],
            self._base,
            list(self._experts.values()),
            [one.path for one in places],
            adapters=[files.tensors for files in self._adapters.values()],
        )

    def recalled(self) -> Opened | None:
        found = None if self._key is None else recall(self._key)
        if found is None:
            return None
        _refuse_unfit_side_files(self._spec, self._base_at.path)
        spec, inputs = (
            self._spec,
            {"base": _input(self._spec.base.model, self._base_at, self._base, copied=True)},
        )
        experts: dict[str, CheckpointSource] = {}
        for task, ref in spec.experts.items():
            if task in self._adapters:
                experts[task] = self._adapters[task].on(self._base, placement=found.placements[task])
            else:
                experts[task] = self._experts[task]
            inputs[f'expert "{task}"'] = _input(ref.ref.model, self._places[task], experts[task])
        weights = {task: ref.weight for task, ref in spec.experts.items()}
        backbone = select_backbone(self._base_at.path, spec.backbone)
        if backbone is not None and not type(backbone).__module__.startswith("merging."):
            return None  # of another package, whose code may have changed
        _read_by_heads(spec, self._base_at.path, [one.path for one in self._places.values()], backbone)
        models = Models(self._base, experts, weights, backbone, frozenset(found.kept))
        _refuse_layers(spec, models)
        heads = {
            task: _HeadTensors(source, frozenset(found.heads.get(task, ())).__contains__)
            for task, source in experts.items()
        }
        return Opened(
            self._base_at.path,
            models,
            inputs,
            heads,
            notes=found.notes,
            findings=found.findings,
            known=found.outline,
        )

    def remember(self, opened: Opened) -> None:
        matched = opened.vocabulary
        changed = matched is not None and (matched.new or matched.rows is not None)
        if self._key is None or changed or opened.prepared is not None:
            return
        if opened.models.base.names() != self._base.names():
            return
        if any(opened.models.experts[task].names() != self._base.names() for task in self._adapters):
            return  # an adapter brings tensors that the base lacks
        heads = {task: tuple(tensors) for task, tensors in opened.heads.items()}
        kept = tuple(sorted(opened.models.kept))
        found = Findings(kept, heads, opened.notes, opened.placements, opened.known, opened.findings)
        remember(self._key, found)


def _read_by_heads(
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


def _refuse_unfit_side_files(spec: PipelineSpec, folder: Path) -> None:
    """Before anything reads them, and before an output folder is made; an adapter gets none of them."""
    if spec.output.form != "lora" and folder.is_dir():
        refuse_unfit_side_files(folder)


def _refuse_layers(spec: PipelineSpec, models: Models) -> None:
    seen = as_seen(models, strategies.get(spec.merge.type))
    if unfit := LayerSettings(spec.merge.layers).problems(seen, spec.merge.settings):
        raise SpecError("merge.layers does not fit the model", problems=unfit)


def _prepared(folder: Path, vocabulary: Matched, backbone: Backbone | None) -> PreparedFolder | None:
    """Config and tokenizer of a result, where they are not the base's: with more tokens (the backbone has as
    many from now on), or no longer marked as quantised."""
    quantised = tuple(key for key in QUANTISED_KEYS if key in (read_config(folder) or {}))
    if not (vocabulary.new or quantised) or not folder.is_dir():
        return None
    rows = None
    if vocabulary.rows is not None:
        rows = (vocabulary.height, vocabulary.rows)
        if backbone is not None:
            backbone.resize_vocabulary(*rows)
    return PreparedFolder(folder, rows=rows, new=vocabulary.new, without=quantised)


def _without_config(label: str, place: ResolvedModel, base: ResolvedModel) -> list[str]:
    """A note where a folder of an expert says less of its architecture than the base's: a file of weights
    has no config by nature, nor has an adapter."""
    has_none = read_config(place.path) is None and open_clip_config(place.path) is None
    if not has_none or not place.path.is_dir() or is_adapter(place.path) or read_config(base.path) is None:
        return []
    file = place.path / "config.json"
    what = f"{place.path} has no config.json"
    if file.is_symlink():
        what = f"its {file} is a link that leads nowhere"
    return [f"{label}: {what}: whether it is of the base's architecture could not be compared"]


def _with_files(given: Input, more: tuple[Path, ...]) -> Input:
    return replace(given, files=tuple(dict.fromkeys((*given.files, *more))))


def _fed(spec: PipelineSpec) -> set[str]:
    """Experts, by label, of whom examples are made by the base's image processor or tokenizer."""
    sources = {task: (one.calibration, one.validation, one.test) for task, one in spec.tasks.items()}
    return {
        f'expert "{task}"'
        for task, given in sources.items()
        if any(source is not None and source.type != "tensors" for source in given)
    }


def _walks(spec: PipelineSpec) -> bool:
    """Whether some method runs models, for which weights must be those of the model class."""
    return any("data" in method.needs for method in _methods(spec).values())


def _methods(spec: PipelineSpec) -> dict[str, type[Method]]:
    """What the spec asks for, by how an error names it."""
    return {
        f'strategy "{spec.merge.type}"': strategies.get(spec.merge.type),
        **{f'calibrator "{one.type}"': calibrators.get(one.type) for one in spec.calibrate},
    }


class _HeadTensors(Mapping[str, Tensor]):
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


def _opened(model: str, revision: str | None, label: str) -> tuple[ResolvedModel, CheckpointSource]:
    place = resolve(model, revision=revision, folder=working_folder(needed=False))
    return place, open_checkpoint(place.path, label)


def _aligned(
    base: CheckpointSource,
    source: CheckpointSource,
    model: nn.Module | None,
    is_head: Callable[[str], bool],
    folder: Path,
    axes: Mapping[str, int],
    is_outer: Callable[[str], bool],
) -> Alignment:
    return align(base, source, model, is_head, tied=ties_head(folder), vocabulary=axes, is_outer=is_outer)


def _input(name: str, place: ResolvedModel, source: CheckpointSource, *, copied: bool = False) -> Input:
    """`copied`: what lies beside the weights goes into the result, and is read too."""
    folder = place.path if place.path.is_dir() else place.path.parent
    names = side_files(place.path).known if copied and place.path.is_dir() else ()
    beside = [folder / name for name in dict.fromkeys((*names, "config.json"))]
    files = dict.fromkeys((*source.files, *(file for file in beside if file.is_file())))
    return Input(name, place.path, tuple(files), place.repo_id is not None, place.revision)


def _task_head(folder: Path, source: CheckpointSource) -> Callable[[str], bool]:
    names = (read_config(folder) or {}).get("architectures") or ()
    return head_of(str(names[0]) if names else None, source.names())


def _own_pooler(base: CheckpointSource, expert: CheckpointSource, folder: Path) -> Callable[[str], bool]:
    """A pooler that the base lacks and the expert's classifier of texts reads is a part of its head."""
    names: list[str] = (read_config(folder) or {}).get("architectures") or []
    reads = any(name.endswith("ForSequenceClassification") for name in names[:1])
    if not reads or any(map(is_pooler, base.names())) or not any(map(is_pooler, expert.names())):
        return _no_head
    return is_pooler


def _either(first: Callable[[str], bool], second: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda name: first(name) or second(name)


def _no_head(name: str) -> bool:
    return False
