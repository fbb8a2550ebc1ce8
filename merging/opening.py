"""From a spec to opened models and tasks: headers are read, everything is compared, nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from merging.architecture import select_backbone, ties_head
from merging.backbones.pretrained import is_pooler
from merging.backbones.task_heads import head_of
from merging.checkpoints.alignment import Alignment, align
from merging.checkpoints.clip_layouts import mixed_libraries
from merging.checkpoints.folder import config as read_config
from merging.checkpoints.folder import open_clip_config
from merging.checkpoints.hub import ResolvedModel, resolve
from merging.checkpoints.lora import is_adapter, open_adapter
from merging.checkpoints.lora_places import Placement
from merging.checkpoints.lora_roles import outline_of
from merging.checkpoints.names import NameMap, module_names
from merging.checkpoints.parts import Parts
from merging.checkpoints.prepared import PreparedFolder
from merging.checkpoints.quantised import QUANTISED_KEYS
from merging.checkpoints.source import CheckpointSource, FilledSource
from merging.checkpoints.vocabulary_rows import vocabulary_axes
from merging.checkpoints.wrappers import unwrapped
from merging.contracts.backbone import Backbone
from merging.contracts.models import Models
from merging.errors import CheckpointError, MergingError, Problem
from merging.loaded_class import class_problems
from merging.opened import (
    HeadTensors,
    Input,
    Opened,
    fed_by_base,
    input_of,
    methods_of,
    open_named,
    read_by_heads,
    refuse_layers,
    refuse_side_files,
    walks_models,
)
from merging.opening_again import Plain, may_be_plain
from merging.output_heads import has_own_head, lacks_output, output_head
from merging.preflight import (
    config_findings,
    config_problems,
    processor_findings,
    refuse_unwalkable,
    running_statistics,
    unfilled_problems,
    unmade_notes,
    unmade_problems,
)
from merging.spec import PipelineSpec
from merging.unfilled import unfilled
from merging.unmade import unmade
from merging.vocabulary import Matched, match_vocabularies
from merging.vocabulary_comparison import Member
from merging.working_folder import working_folder


def open_models(spec: PipelineSpec) -> Opened:
    """Open base and experts and bring all tensors under the base's names.

    Raises CheckpointError that lists every tensor of every expert that does not fit.
    """
    plain = Plain(spec) if may_be_plain(spec) else None
    if plain is not None and (opened := plain.recalled()) is not None:
        return opened
    opened = _compared(spec)
    if plain is not None and opened.by_headers:
        plain.remember(opened)
    return opened


def _compared(spec: PipelineSpec) -> Opened:
    base_at, base = open_named(spec.base.model, spec.base.revision, "base")
    refuse_side_files(spec, base_at.path)
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
    inputs = {"base": input_of(spec.base.model, base_at, base, copied=True)}
    heads: dict[str, Mapping[str, Tensor]] = {}
    placements: dict[str, Placement] = {}
    kept = {name for name in base.names() if keeps(name)}
    notes, problems, by_headers = list(base.notes), [], True
    inside = backbone.module_names(base.names()) if backbone is not None else {}
    problems += config_problems(model, {name: at for name, at in inside.items() if not keeps(name)}, base)
    if backbone is not None and model is not None:
        problems += class_problems(backbone)
        parts = Parts(backbone.parts(base.names()))
        in_parts = {place.name for place in parts.places.values()}
        elsewhere = _either(_either(keeps, is_outer), in_parts.__contains__)
        if names.renamed or names.converted:
            from_parts = set(backbone.module_names(parts.names(base.names())).values())
            problems += unfilled_problems(model, unfilled(model, names, from_parts))
        else:
            notes.append(
                f"base: none of its tensors is one of {type(model).__name__}'s, which its config names: the "
                "results will not open as that class"
            )
        found = unmade(model, names, base, elsewhere)
        by_headers = not found.doubtful  # biases of zeros are among them
        problems += unmade_problems(model, found)
        notes += unmade_notes(model, found)
    notes += backbone.remarks() if backbone is not None else ()
    if read_config(base_at.path) is None and open_clip_config(base_at.path) is None:
        notes.append(f"{base_at.path} has no config.json: from_pretrained will not open the results")
    for task, ref in spec.experts.items():
        label = f'expert "{task}"'
        try:
            if ref.adapter is None:
                place, source = open_named(ref.ref.model, ref.revision, label)
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
        outer: Callable[[str], bool] = is_outer
        if lacks_output(place.path, base_at.path):
            kept |= output if has_own_head(place.path) else frozenset()
            outer = _either(is_outer, output.__contains__)
        fit = _aligned(base, source, model, _either(keeps, is_head), at, axes, outer)
        problems += fit.problems
        notes += [*source.notes, *fit.notes, *_without_config(label, place, base_at)]
        kept.update(fit.absent)
        absent[label] = fit.absent
        inputs[label] = input_of(ref.ref.model, place, source)
        members[label] = Member(fit.source, place.path, ref.weight)
        heads[task] = HeadTensors(source, is_head)
    if spec.merge.type == "checkpoint":
        settings: Any = spec.merge.settings
        place, source = open_named(settings.model, settings.revision, "merged model")
        source = unwrapped(source, model, base)
        fit = _aligned(base, source, model, keeps, place.path, axes, is_outer)
        problems += fit.problems
        inputs["merged"] = input_of(settings.model, place, source)
        members["merged"] = Member(fit.source, place.path)
    notes += read_by_heads(spec, base_at.path, places, backbone, output)
    vocabulary = match_vocabularies(
        spec.vocabulary, base, base_at.path, members, axes, walks=walks_models(spec)
    )
    problems += vocabulary.problems
    folders = {label: given.path for label, given in inputs.items() if label != "base"}
    findings = config_findings(base_at.path, folders)
    findings += processor_findings(base_at.path, folders, fed_by_base(spec))
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
    refuse_unwalkable(backbone, base, base_at.path, methods_of(spec))
    notes += running_statistics(base)
    weights = {task: spec.experts[task].weight for task in experts}
    models = Models(base, experts, weights, backbone, frozenset(kept))
    refuse_layers(spec, models)
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
        by_headers,
    )


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
