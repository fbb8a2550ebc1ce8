"""Component: a method by its name, with settings that its own class has checked."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SerializationInfo,
    WithJsonSchema,
    model_serializer,
)

from merging.components import backbones, calibrators, strategies
from merging.errors import MergingError, SpecError
from merging.layer_settings import LayerEntry, changed
from merging.registry import did_you_mean
from merging.settings import Settings
from merging.spec.findings import Findings
from merging.spec.layers import read_layers
from merging.spec.paths import Paths
from merging.spec.text import plain
from merging.spec.wording import described, join, shortened

if TYPE_CHECKING:
    from merging.registry import Registry

Kind: TypeAlias = Literal["strategies", "calibrators", "backbones"]

AUTO = "auto"
"""The backbone that the checkpoint's config names."""


class Component(BaseModel):
    """A method's name and its checked settings; in JSON one object: `{"type": "ties", "density": 0.2}`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: str
    settings: Settings = Settings()
    layers: tuple[LayerEntry, ...] = ()  # where they differ; of merge rules only

    def all_settings(self) -> tuple[Settings, ...]:
        """The settings, and those of each entry of `layers`."""
        return (
            self.settings,
            *(changed(self.settings, one.changes) for one in self.layers if one.changes),
        )

    @model_serializer
    def _flat(self, info: SerializationInfo) -> dict[str, Any]:
        layers = {"layers": [entry.model_dump() for entry in self.layers]} if self.layers else {}
        return {"type": self.type, **self.settings.model_dump(mode=info.mode), **layers}


class AutoSettings(Settings):
    """`auto` has no settings."""


def find_class(kind: Kind, name: str) -> Any:
    """The registered class. Raises SpecError for an unknown name, or one whose module cannot be imported."""
    registries: dict[Kind, Registry[Any]] = {
        "strategies": strategies,
        "calibrators": calibrators,
        "backbones": backbones,
    }
    registry = registries[kind]
    try:
        return registry.get(name)
    except MergingError:
        raise
    except Exception as error:  # an entry point runs other people's code
        what = f"{type(error).__name__}: {shortened(str(error), 200)}"
        raise SpecError(f'{registry.kind} "{name}" cannot be loaded: {what}') from error


def settings_class(kind: Kind, name: str) -> type[Settings]:
    """The class that checks the settings of that method."""
    if kind == "backbones" and name == AUTO:
        return AutoSettings
    found = getattr(find_class(kind, name), "Settings", None)
    if not (isinstance(found, type) and issubclass(found, Settings)):
        raise SpecError(f'"{name}": its class Settings must derive from merging.Settings')
    if taken := {"type", "layers"} & found.model_fields.keys():
        raise SpecError(
            f'"{name}": a setting cannot be called "{min(taken)}", which has a meaning of its own'
        )
    return found


def read_component(
    kind: Kind,
    value: object,
    where: str,
    findings: Findings,
    paths: Paths | None = None,
    *,
    inner: bool = False,
) -> Component | None:
    """The component, or None after findings. With `paths`, its models and paths are resolved.

    A setting called `model` is a folder or hub id, one of type Path lies relative to the spec's folder.
    `inner`: it is itself a setting of another component, whose `layers` are for both.
    """
    value = {"type": value} if isinstance(value, str) else value
    if not isinstance(value, dict):
        findings.add(where, f"found {described(value)}, expected an object", 'Like {"type": "...", ...}.')
        return None
    name = value.get("type")
    if not isinstance(name, str):
        found = f"found {described(name)}, expected a name" if "type" in value else "missing"
        findings.add(join(where, "type"), found, f"One of `merging list {kind}`.")
        return None
    try:
        model = settings_class(kind, name)
    except SpecError as error:
        remedy = error.remedy
        if kind == "backbones" and remedy.startswith("valid"):
            remedy = did_you_mean(name, [AUTO, *backbones.names()])
        findings.add(join(where, "type"), error.message, remedy)
        return None
    apart = ("layers", "type") if kind == "strategies" and not inner else ("type",)
    findings.keys(where, model, *apart)
    inside = {
        key: read_component("strategies", value[key], join(where, key), findings, paths, inner=True)
        for key, field in model.model_fields.items()
        if field.annotation is Component and key in value
    }
    given = {key: item for key, item in value.items() if key not in apart and key not in inside}
    settings = findings.read(model, given, where)
    if settings is None or None in inside.values():
        return None
    settings = settings.model_copy(update=inside)
    layers: tuple[LayerEntry, ...] | None = ()
    if "layers" in apart and value.get("layers") is not None:
        layers = read_layers(value["layers"], find_class(kind, name), model, given, where, findings)
    if layers is None:
        return None
    settings = _resolved(settings, where, paths) if paths else settings
    return Component(type=name, settings=settings, layers=layers)


def _resolved(settings: Settings, where: str, paths: Paths) -> Settings:
    changed: dict[str, object] = {}
    for key in type(settings).model_fields:
        value = getattr(settings, key)
        if key == "model" and isinstance(value, str):
            revision = getattr(settings, "revision", None)
            changed[key] = paths.model(value, join(where, key), revision=revision)
        elif isinstance(value, Path):
            changed[key] = paths.absolute(value)
    return settings.model_copy(update=changed)


def _coerced(kind: Kind, value: object) -> object:
    if isinstance(value, Component):
        return value
    findings = Findings()
    component = read_component(kind, plain({kind: value}, "spec")[kind], "", findings)
    if component is None:
        raise SpecError(f"{kind} cannot be read", problems=findings.problems())
    return component


def _listed(value: object) -> object:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)


Strategy: TypeAlias = Annotated[Component, BeforeValidator(partial(_coerced, "strategies"))]
InnerRule: TypeAlias = Annotated[
    Strategy,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]},
            ]
        }
    ),
]
"""A setting that is itself a strategy: its name, or an object with its settings."""
BackboneChoice: TypeAlias = Annotated[Component, BeforeValidator(partial(_coerced, "backbones"))]
Calibrators: TypeAlias = Annotated[
    tuple[Annotated[Component, BeforeValidator(partial(_coerced, "calibrators"))], ...],
    BeforeValidator(_listed),
]
