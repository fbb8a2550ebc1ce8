"""The JSON Schema for editors."""

from __future__ import annotations

import json

import merging
from merging.spec import schema


def test_every_method_is_in_it_with_its_settings():
    found = schema()["properties"]

    names = [form["properties"]["type"]["const"] for form in found["merge"]["oneOf"] if "properties" in form]
    assert names == [name for name in merging.available("strategies") if name in names]
    assert {"average", "ties", "regmean", "checkpoint"} <= set(names)
    ties = next(form for form in found["merge"]["oneOf"] if form.get("title") == "ties")
    assert ties["properties"]["density"]["maximum"] == 1
    assert ties["properties"]["density"]["default"] == 0.2
    assert ties["properties"]["density"]["description"]
    assert ties["additionalProperties"] is False


def test_all_that_it_refers_to_is_there():
    text = json.dumps(schema())

    for name in schema()["$defs"]:
        assert f"#/$defs/{name}" in text
    assert text.count('"$ref"') == sum(text.count(f'"#/$defs/{name}"') for name in schema()["$defs"])


def test_short_forms_are_allowed():
    found = schema()

    assert found["required"] == ["base", "merge"]
    assert found["properties"]["base"]["anyOf"][0]["type"] == "string"
    assert found["properties"]["experts"]["additionalProperties"]["anyOf"][0]["type"] == "string"
    assert found["properties"]["calibrate"]["anyOf"][1]["type"] == "array"
    assert "checkpoint" not in found["properties"]["merge"]["oneOf"][-1]["enum"]


def test_data_and_heads_are_told_apart_by_type():
    task = schema()["properties"]["tasks"]["additionalProperties"]["properties"]

    kinds = [form["properties"]["type"]["const"] for form in task["calibration"]["oneOf"]]
    assert kinds == ["tensors", "images", "text", "dataset"]
    assert "choice" in task["metric"]["anyOf"][0]["enum"]
    assert task["head"]["oneOf"][1]["properties"]["type"]["const"] == "expert"
