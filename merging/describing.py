"""describe: the model card and the manifest of a checkpoint, added before it is published."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from merging.checkpoints.disk_sink import SafetensorsSink
from merging.checkpoints.folder import config as read_config
from merging.checkpoints.lora_sink import LoraSink
from merging.checkpoints.parts import parts_seen
from merging.components import strategies
from merging.contracts.merger import MergeNotes
from merging.data.kept_heads import HEAD_FILE
from merging.data.task import Task
from merging.fates import fates
from merging.layer_settings import LayerSettings
from merging.licences import licence_of
from merging.opened import Opened
from merging.provenance import manifest
from merging.report.card import MethodUsed, Origin, model_card
from merging.report.report import SURGERY_NOTE
from merging.report.solver import ParameterFate
from merging.spec import Component, PipelineSpec


def describe(
    sink: SafetensorsSink | LoraSink,
    stage: str,
    facts: Mapping[str, Any],
    methods: Sequence[tuple[Component, Any]],
    notes: MergeNotes,
    *,
    spec: PipelineSpec,
    opened: Opened,
    tasks: Mapping[str, Task],
    inputs: Mapping[str, Any],
    device: str,
) -> None:
    """Give README.md and manifest.json to the sink. `facts`: all that decides the checkpoint's bytes;
    `inputs`: what `inputs_read` says."""
    about = manifest(
        stage=stage,
        facts=facts,
        spec=spec,
        opened=opened,
        inputs=inputs,
        methods=methods,
        device=device,
        calibration=calibrated_on(tasks),
        notes={
            **{key: value for key, value in notes.items() if key not in ("solved", "left")},
            **({"adapter": sink.summary()} if isinstance(sink, LoraSink) else {}),
            "heads": kept_heads(tasks, opened.heads),
            "side_files": list(sink.copied.known),
            "not_copied": list(sink.copied.unknown),
        },
    )
    about["parameters"] = {
        name: fate.model_dump(exclude_defaults=True) for name, fate in _fates(spec, opened, notes).items()
    }
    sink.add_file("manifest.json", json.dumps(about, indent=2, ensure_ascii=False, default=str))
    origins = {
        role: Origin(given.name, given.hub, given.revision, licence_of(given.folder))
        for role, given in opened.inputs.items()
    }
    changes = any(getattr(method, "changes_inference", False) for _, method in methods)
    sink.add_file(
        "README.md",
        model_card(
            title=f"{stage.capitalize()} model",
            base=origins["base"],
            experts={task: origins[f'expert "{task}"'] for task in opened.models.tasks},
            methods=[_used(one, method) for one, method in methods],
            load=_how_to_load(opened, adapter=isinstance(sink, LoraSink)),
            inference_note=SURGERY_NOTE if changes else "",
        ),
    )


def _fates(spec: PipelineSpec, opened: Opened, notes: Mapping[str, Any]) -> dict[str, ParameterFate]:
    parts = parts_seen(opened.models, strategies.get(spec.merge.type))
    layers = LayerSettings(spec.merge.layers)
    return fates(opened.models, parts, layers, set(notes.get("solved", ())), notes.get("left", {}))


def kept_heads(
    tasks: Mapping[str, Task], own: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Any]]:
    """Task -> the file of the linear head that scores it and what is in it, and that of its expert's own."""
    found: dict[str, dict[str, Any]] = {}
    for name, task in tasks.items():
        if task.head is not None:
            dense = task.head.dense
            read = task.head.shape[-1] if dense is None else dense.weight_HF.shape[0]
            shapes = {"weight": [task.head.shape[0], read]}
            if dense is not None:
                shapes |= {"dense.weight": [*dense.weight_HF.shape], "dense.bias": [*dense.bias_H.shape]}
            if task.head.bias_C is not None:
                shapes["bias"] = list(task.head.bias_C.shape)
            found[name] = {"file": f"heads/{name}.safetensors", **shapes}
    for name, tensors in own.items():
        if tensors:
            kept = {"file": f"heads/{name}/{HEAD_FILE}", "tensors": sorted(tensors)}
            found.setdefault(name, {})["own"] = kept
    return found


def calibrated_on(tasks: Mapping[str, Task]) -> dict[str, dict[str, Any]]:
    """Task -> its calibration examples: how many were asked for and used, and their fingerprint."""
    return {
        name: {
            "asked": task.calibration.asked,
            "used": len(task.calibration),
            "fingerprint": task.calibration.fingerprint,
        }
        for name, task in tasks.items()
        if task.calibration is not None
    }


def _used(component: Component, method: Any) -> MethodUsed:
    settings = {key: value for key, value in component.model_dump(mode="json").items() if key != "type"}
    return MethodUsed(component.type, method.summary(), method.paper, settings)


def _how_to_load(opened: Opened, *, adapter: bool) -> str:
    backbone = opened.models.backbone
    if backbone is not None and (code := backbone.how_to_load("path/to/this/folder")):
        return code
    names = (read_config(opened.base_folder) or {}).get("architectures") or ()
    name = str(names[0]) if names else "AutoModel"
    if adapter:
        return (
            f"from peft import PeftModel\nfrom transformers import {name}\n\n"
            f'base = {name}.from_pretrained("path/to/the/base")\n'
            'model = PeftModel.from_pretrained(base, "path/to/this/folder")'
        )
    return f'from transformers import {name}\n\nmodel = {name}.from_pretrained("path/to/this/folder")'
