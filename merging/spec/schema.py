"""JSON Schema of the spec, for editors: made from the same classes that check it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from merging.components import backbones, calibrators, strategies
from merging.data.spec import DATA_TYPES, HEAD_TYPES, TaskSpec
from merging.errors import SpecError
from merging.evaluation.metric_spec import METRIC_TYPES
from merging.layer_settings import LayerEntry
from merging.spec.component import AUTO, Kind, find_class, settings_class
from merging.spec.pipeline_spec import DTYPES, ExpertRef, ModelRef, OutputSpec, PipelineSpec

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """The whole spec; methods of installed packages are in it, those of a spec's own plug-ins cannot be."""
    definitions: dict[str, Any] = {}  # what settings of methods refer to; our own sections are written out
    properties = _section(PipelineSpec)["properties"]
    model = _text_or(_section(ModelRef), "A folder or hub id.")
    expert = _section(ExpertRef)
    expert["oneOf"] = [{"required": ["model"]}, {"required": ["adapter"]}]
    task = _section(TaskSpec)
    data = {"oneOf": [_variant(kind) for kind in DATA_TYPES.values()]}
    head = {"oneOf": [_variant(kind) for kind in HEAD_TYPES.values()]}
    for key, form in (("calibration", data), ("validation", data), ("test", data), ("head", head)):
        task["properties"][key] = _described(form, TaskSpec, key)
    metrics = [_variant(kind) for kind in METRIC_TYPES.values()]
    metric = {"anyOf": [{"enum": [name for name in METRIC_TYPES if name != "lm_eval"]}, {"oneOf": metrics}]}
    task["properties"]["metric"] = _described(metric, TaskSpec, "metric")
    output = _section(OutputSpec)
    output["properties"]["shard_size"] = {
        **_described(output["properties"]["shard_size"], OutputSpec, "shard_size"),
        "type": ["integer", "string"],
    }
    output["properties"]["dtype"]["enum"] = list(DTYPES)
    rank = {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"const": "exact"}]}
    output["properties"]["rank"] = _described(rank, OutputSpec, "rank")
    merge = _methods("strategies", strategies.names(), definitions)
    calibrator = _methods("calibrators", calibrators.names(), definitions)
    sections = {
        "base": model,
        "experts": _mapping(_text_or(expert, "A folder or hub id of a full checkpoint.")),
        "backbone": _methods("backbones", (AUTO, *backbones.names()), definitions),
        "merge": merge,
        "calibrate": {"anyOf": [calibrator, {"type": "array", "items": calibrator}]},
        "tasks": _mapping(task),
        "output": output,
    }
    properties["memory"] = {**properties["memory"], "type": ["integer", "string"]}
    for key, form in sections.items():
        properties[key] = _described(form, PipelineSpec, key)
    for kind in ("merge", "calibrate", "tasks", "output", "experts", "base", "backbone"):
        properties[kind].pop("default", None)
    return {
        "$schema": _DIALECT,
        "title": "merging pipeline spec",
        "type": "object",
        "properties": properties,
        "required": ["base", "merge"],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _methods(kind: Kind, names: tuple[str, ...], definitions: dict[str, Any]) -> dict[str, Any]:
    """One of the registered methods with its settings; its name alone, where no setting is required."""
    objects, alone = [], []
    for name in names:
        try:
            settings = settings_class(kind, name)
            about = "Read from the checkpoint's config." if name == AUTO else find_class(kind, name).summary()
        except SpecError:  # a broken plug-in of some installed package must not take the schema away
            continue
        form = _object(settings, definitions, f"{kind}.{name}")
        form["properties"] = {"type": {"const": name}, **form["properties"]}
        form["required"] = ["type", *form.get("required", [])]
        if kind == "strategies":
            form["properties"]["layers"] = _layers(form["properties"], find_class(kind, name).by_layer)
        objects.append({"title": name, "description": about, **form})
        if form["required"] == ["type"]:
            alone.append(name)
    return {"oneOf": [*objects, {"enum": alone}]} if alone else {"oneOf": objects}


def _layers(settings: dict[str, Any], by_layer: frozenset[str] | None) -> dict[str, Any]:
    """Entries of `layers`: a pattern, and those settings of the rule that may differ by tensor."""
    entry = _section(LayerEntry)
    del entry["properties"]["changes"]
    for key, form in settings.items():
        if key not in entry["properties"] and key != "type" and (by_layer is None or key in by_layer):
            entry["properties"][key] = {word: item for word, item in form.items() if word != "default"}
    entry["required"] = ["match"]
    return {"description": "Where settings differ; later entries win.", "type": "array", "items": entry}


def _object(model: type[BaseModel], definitions: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The model's schema without its name; what it refers to goes to `definitions` under the prefix."""
    form = model.model_json_schema(ref_template=f"#/$defs/{prefix}.{{model}}")
    for name, definition in form.pop("$defs", {}).items():
        definitions[f"{prefix}.{name}"] = definition
    properties = {
        key: {word: item for word, item in value.items() if word != "title"}
        for key, value in form.get("properties", {}).items()
    }
    kept = {key: form[key] for key in ("required",) if key in form}
    return {"type": "object", "properties": properties, "additionalProperties": False, **kept}


def _section(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of one of our own models, without `null` for what may be left out."""
    form = _object(model, {}, "")
    for key, value in form["properties"].items():
        if value.get("default", ...) is None:
            kept = next(iter(value.get("anyOf", [{}])))
            form["properties"][key] = {"description": value.get("description", ""), **kept}
    return form


def _variant(model: type[BaseModel]) -> dict[str, Any]:
    form = _section(model)
    form["required"] = ["type", *form.get("required", [])]
    form["properties"]["type"].pop("default", None)
    return {"description": (model.__doc__ or "").strip(), **form}


def _text_or(form: dict[str, Any], about: str) -> dict[str, Any]:
    return {"anyOf": [{"type": "string", "minLength": 1, "description": about}, form]}


def _mapping(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": form}


def _described(form: dict[str, Any], model: type[BaseModel], key: str) -> dict[str, Any]:
    return {"description": model.model_fields[key].description or "", **form}
