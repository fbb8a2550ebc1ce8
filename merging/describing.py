"""describe: the model card and the manifest of a checkpoint, added before it is published."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from merging.checkpoints.disk_sink import SafetensorsSink
from merging.checkpoints.lora_sink import LoraSink
from merging.contracts.merger import MergeNotes
from merging.data.task import Task
from merging.opening import Opened
from merging.provenance import manifest
from merging.report.card import MethodUsed, Origin, model_card
from merging.report.report import SURGERY_NOTE
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
    hashes: Mapping[str, Mapping[str, str]],
    device: str,
) -> None:
    """Give README.md and manifest.json to the sink. `facts`: all that decides the checkpoint's bytes."""
    about = manifest(
        stage=stage,
        facts=facts,
        spec=spec,
        opened=opened,
        hashes=hashes,
        device=device,
        calibration=_calibration(tasks),
        notes={
            **notes,
            **({"adapter": sink.summary()} if isinstance(sink, LoraSink) else {}),
            "heads": _heads(tasks),
            "side_files": list(sink.copied.known),
            "not_copied": list(sink.copied.unknown),
        },
    )
    sink.add_file("manifest.json", json.dumps(about, indent=2, ensure_ascii=False, default=str))
    origins = {role: Origin(given.name, given.hub, given.revision) for role, given in opened.inputs.items()}
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


def _heads(tasks: Mapping[str, Task]) -> dict[str, dict[str, Any]]:
    """Task -> the file of its head, and what is in it."""
    found = {}
    for name, task in tasks.items():
        if task.head is not None:
            shapes = {"weight": list(task.head.weight_CF.shape)}
            if task.head.bias_C is not None:
                shapes["bias"] = list(task.head.bias_C.shape)
            found[name] = {"file": f"heads/{name}.safetensors", **shapes}
    return found


def _calibration(tasks: Mapping[str, Task]) -> dict[str, dict[str, Any]]:
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
    names = list(getattr(backbone.config, "architectures", None) or ()) if backbone is not None else []
    name = str(names[0]) if names else "AutoModel"
    if adapter:
        return (
            f"from peft import PeftModel\nfrom transformers import {name}\n\n"
            f'base = {name}.from_pretrained("path/to/the/base")\n'
            'model = PeftModel.from_pretrained(base, "path/to/this/folder")'
        )
    return f'from transformers import {name}\n\nmodel = {name}.from_pretrained("path/to/this/folder")'
