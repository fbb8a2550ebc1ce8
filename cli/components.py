"""`merging list` and `merging show`: what methods there are, as their own classes tell."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merging.errors import MergingError, SpecError

from .output import print_json, print_text
from .render import key_values, table

if TYPE_CHECKING:
    from merging.spec.component import Kind

LIST_EXAMPLE = "Example: merging list strategies"
SHOW_EXAMPLE = "Example: merging show ties"

KINDS: tuple[Kind, ...] = ("strategies", "calibrators", "backbones")


def list_methods(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="[KIND]", show_default=False, help="strategies, calibrators or backbones."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Names of the methods that a spec may use, with what they need."""
    from merging.components import available
    from merging.registry import did_you_mean

    if kind is not None and kind not in KINDS:
        raise SpecError(f'there is no list of "{kind}"', remedy=did_you_mean(kind, KINDS))
    kinds = [known for known in KINDS if kind in (None, known)]
    found = {known: [described(known, name) for name in available(known)] for known in kinds}
    if as_json:
        print_json(found)
        return
    for place, (known, methods) in enumerate(found.items()):
        if place:
            print_text("")
        if len(found) > 1:
            print_text(known)
        if known == "backbones":
            rows = [[method["name"], method["summary"]] for method in methods]
            print_text(table(["name", ""], rows, indent=2))
        else:
            rows = [[method["name"], ", ".join(method["needs"]), method["summary"]] for method in methods]
            print_text(table(["name", "needs", ""], rows, indent=2))


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `merging list`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """One method: what it does and needs, its settings with defaults and bounds, its paper."""
    from merging.components import available
    from merging.registry import did_you_mean

    found = [(kind, described(kind, name)) for kind in KINDS if name in available(kind)]
    if not found:
        names = [known for kind in KINDS for known in available(kind)]
        raise SpecError(f'there is no method "{name}"', remedy=did_you_mean(name, names))
    if as_json:
        print_json(dict(found))
        return
    print_text("\n\n".join(_page(kind, method) for kind, method in found))


def described(kind: Kind, name: str) -> dict[str, Any]:
    """What the class of that name says of itself. One that cannot be loaded says why."""
    from merging.spec.component import find_class, settings_class

    try:
        cls: Any = find_class(kind, name)
        settings = settings_class(kind, name).model_json_schema()
    except MergingError as error:
        return {"name": name, "summary": error.message, "needs": [], "settings": []}
    known = {
        "name": name,
        "summary": cls.summary(),
        "about": inspect.cleandoc(cls.__doc__ or ""),
        "settings": [_setting(key, form, settings) for key, form in settings.get("properties", {}).items()],
    }
    if kind == "backbones":
        return {**known, "model_types": sorted(cls.model_types), "needs": []}
    known |= {"needs": sorted(cls.needs), "paper": cls.paper, "memory": cls.memory}
    if kind == "strategies":
        return {**known, "weighted": cls.weighted}
    return {**known, "changes_inference": cls.changes_inference}


def _setting(name: str, form: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "default": form.get("default"),
        "required": name in settings.get("required", []),
        "values": _values(form),
        "description": form.get("description", ""),
    }


def _values(form: dict[str, Any]) -> str:
    """`0 < number <= 1`, `whole number >= 1`, `feed | block | none`."""
    if "anyOf" in form:
        return " or ".join(_values(part) for part in form["anyOf"])
    if "enum" in form or "const" in form:
        return " | ".join(map(str, form.get("enum", [form.get("const")])))
    words = {"integer": "whole number", "boolean": "true or false", "string": "text", "array": "list"}
    kind = form.get("type", "value")
    text = words.get(kind, kind)
    for key, sign in (("exclusiveMinimum", "<"), ("minimum", "<=")):
        if key in form:
            text = f"{form[key]:g} {sign} {text}"
    for key, sign in (("exclusiveMaximum", "<"), ("maximum", "<=")):
        if key in form:
            text = f"{text} {sign} {form[key]:g}"
    return text


def _page(kind: Kind, method: dict[str, Any]) -> str:
    facts = {"kind": {"strategies": "strategy", "calibrators": "calibrator", "backbones": "backbone"}[kind]}
    if needs := method["needs"]:
        facts["needs"] = ", ".join(needs)
    if method.get("weighted"):
        facts["weights"] = "of experts are used"
    if method.get("changes_inference"):
        facts["inference"] = "must apply the method's modules, with the task known"
    if types := method.get("model_types"):
        facts["model types"] = ", ".join(types)
    for key in ("memory", "paper"):
        if method.get(key):
            facts[key] = method[key]
    blocks = [method["name"], method.get("about") or method["summary"], key_values(facts)]
    if method["settings"]:
        rows = [
            [item["name"], _default(item), item["values"], item["description"]] for item in method["settings"]
        ]
        blocks.append(f"settings\n{table(['name', 'default', 'values', ''], rows, indent=2)}")
    key = {"strategies": "merge", "calibrators": "calibrate", "backbones": "backbone"}[kind]
    blocks.append(f'in the spec\n  "{key}": {{"type": "{method["name"]}"{_example(method["settings"])}}}')
    return "\n\n".join(blocks)


def _default(item: dict[str, Any]) -> str:
    return "required" if item["required"] else json.dumps(item["default"], ensure_ascii=False)


def _example(settings: list[dict[str, Any]]) -> str:
    shown = [item for item in settings if item["required"]] or settings[:1]
    values = ['"..."' if item["required"] else _default(item) for item in shown]
    return "".join(f', "{item["name"]}": {value}' for item, value in zip(shown, values, strict=True))
