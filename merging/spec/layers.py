"""`layers` of a merge rule: where its settings differ, each entry checked by the rule's own class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from merging.layer_settings import LayerEntry
from merging.settings import Settings
from merging.spec.findings import Findings
from merging.spec.wording import described, join

_OWN = ("match", "leave_out")
_LIKE = 'Like [{"match": "*attn*", "density": 0.5}, {"match": "embeddings.*", "leave_out": true}].'


def read_layers(
    value: object,
    rule: Any,
    model: type[Settings],
    given: Mapping[str, Any],
    where: str,
    findings: Findings,
) -> tuple[LayerEntry, ...] | None:
    """The entries, or None after findings. `given`: the rule's settings, valid by now."""
    if not isinstance(value, list | tuple):  # in Python a tuple will do
        findings.add(join(where, "layers"), f"found {described(value)}, expected a list", _LIKE)
        return None
    places = [f"{join(where, 'layers')}[{number}]" for number in range(len(value))]
    read = [
        _entry(item, rule, model, given, place, findings) for item, place in zip(value, places, strict=True)
    ]
    return None if None in read else tuple(entry for entry in read if entry is not None)


def _entry(
    value: object,
    rule: Any,
    model: type[Settings],
    given: Mapping[str, Any],
    where: str,
    findings: Findings,
) -> LayerEntry | None:
    if not isinstance(value, dict):
        findings.add(where, f"found {described(value)}, expected an object", _LIKE)
        return None
    findings.keys(where, model, *_OWN)
    changes = {key: item for key, item in value.items() if key not in _OWN}
    before = len(findings)
    settings = findings.read(model, {**given, **changes}, where)
    fields = LayerEntry.model_fields
    if "match" not in value:
        findings.add(join(where, "match"), "missing", fields["match"].description or "")
    own = {
        key: findings.read(Annotated[fields[key].annotation, fields[key]], value[key], join(where, key))
        for key in _OWN
        if key in value
    }
    fixed = [key for key in changes if rule.by_layer is not None and key not in rule.by_layer]
    for key in fixed if settings is not None else ():
        may = ", ".join(sorted(rule.by_layer))
        remedy = f"what may differ: {may}" if may else 'an entry may only say "leave_out": true'
        findings.add(join(where, key), "holds for the whole model with this rule", remedy)
    if own.get("leave_out") and changes:
        what = f"leaves tensors out and sets {', '.join(changes)} for them"
        findings.add(where, what, "One of the two.")
    elif own.get("leave_out") is None and not changes:
        findings.add(where, "changes nothing", 'Give a setting, or "leave_out": true.')
    if len(findings) > before:
        return None
    checked = settings.model_dump(mode="json")
    return LayerEntry(**own, changes={key: checked[key] for key in changes})
