"""Checkpoints that were opened before: without the libraries that understand them."""

from __future__ import annotations

from typing import Any

from merging.architecture import select_backbone
from merging.checkpoints.hub import ResolvedModel, resolve
from merging.checkpoints.lora import AdapterFiles
from merging.checkpoints.source import CheckpointSource
from merging.contracts.models import Models
from merging.errors import MergingError
from merging.opened import (
    HeadTensors,
    Opened,
    fed_by_base,
    input_of,
    open_named,
    read_by_heads,
    refuse_layers,
    refuse_side_files,
    walks_models,
)
from merging.output_heads import only_heads_read
from merging.remembered import Findings, key_of, recall, remember
from merging.spec import PipelineSpec
from merging.working_folder import working_folder


def opens_plainly(spec: PipelineSpec) -> bool:
    """Whether these models were opened before, so that a run will not need the libraries that understand
    them."""
    return may_be_plain(spec) and Plain(spec).recalled() is not None


def may_be_plain(spec: PipelineSpec) -> bool:
    """Whether full checkpoints are to be merged by their tensors alone."""
    return (
        not walks_models(spec)
        and spec.merge.type != "checkpoint"
        and spec.vocabulary is None
        and not spec.plugins
    )


class Plain:
    """Opens checkpoints that were opened before, without the libraries that understand them."""

    def __init__(self, spec: PipelineSpec) -> None:
        self._spec = spec
        self._base_at, self._base = open_named(spec.base.model, spec.base.revision, "base")
        self._key: str | None = None
        self._places: dict[str, ResolvedModel] = {}
        self._experts: dict[str, CheckpointSource] = {}  # whole checkpoints
        self._adapters: dict[str, AdapterFiles] = {}
        try:
            for task, ref in spec.experts.items():
                label = f'expert "{task}"'
                if ref.adapter is None:
                    self._places[task], self._experts[task] = open_named(ref.ref.model, ref.revision, label)
                    continue
                place = resolve(ref.adapter, revision=ref.revision, folder=working_folder(needed=False))
                self._places[task], self._adapters[task] = place, AdapterFiles.of(place.path, label)
        except MergingError:  # told, with all other problems, by whoever compares them
            return
        places = [self._base_at, *self._places.values()]
        asked: list[Any] = [
            list(spec.experts),
            spec.backbone.model_dump(mode="json"),
            spec.allow,
            spec.base.model,
        ]
        asked += [
            sorted(fed_by_base(spec)),
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
        refuse_side_files(self._spec, self._base_at.path)
        spec, inputs = (
            self._spec,
            {"base": input_of(self._spec.base.model, self._base_at, self._base, copied=True)},
        )
        experts: dict[str, CheckpointSource] = {}
        for task, ref in spec.experts.items():
            if task in self._adapters:
                experts[task] = self._adapters[task].on(self._base, placement=found.placements[task])
            else:
                experts[task] = self._experts[task]
            inputs[f'expert "{task}"'] = input_of(ref.ref.model, self._places[task], experts[task])
        weights = {task: ref.weight for task, ref in spec.experts.items()}
        backbone = select_backbone(self._base_at.path, spec.backbone)
        if backbone is not None and not type(backbone).__module__.startswith("merging."):
            return None  # of another package, whose code may have changed
        read_by_heads(spec, self._base_at.path, [one.path for one in self._places.values()], backbone)
        models = Models(self._base, experts, weights, backbone, frozenset(found.kept))
        refuse_layers(spec, models)
        heads = {
            task: HeadTensors(source, frozenset(found.heads.get(task, ())).__contains__)
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
