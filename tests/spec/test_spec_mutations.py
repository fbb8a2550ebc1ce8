"""Whatever a spec says, the answer is a spec or a SpecError."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from merging.errors import SpecError
from merging.spec import PipelineSpec, load_spec, parse_spec

GOOD = {
    "base": "org/base",
    "experts": {"a": "org/a", "b": {"model": "org/b", "weight": 1.0}},
    "backbone": {"type": "auto"},
    "merge": {"type": "ties", "density": 0.3},
    "calibrate": [{"type": "featcal", "ridge": 0.1}],
    "tasks": {
        "a": {"calibration": {"type": "images", "path": ".", "examples": 3}, "head": {"type": "expert"}},
        "b": {"calibration": {"type": "images", "path": "."}, "metric": "accuracy"},
    },
    "output": {"path": "out", "dtype": "base", "shard_size": "5GB"},
    "device": "cpu",
    "seed": 0,
    "allow": ["x"],
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["./x", "ties", "regmean", "checkpoint", "auto", "5GB", "..", "~a", "a/b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: object, path: tuple = ()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutated(draw) -> dict:
    raw = copy.deepcopy(GOOD)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([path for path in places(raw) if path]))
        target = raw
        for key in path[:-1]:
            target = target[key]
        change = draw(st.sampled_from(["replace", "remove", "add"]))
        if change == "add" and isinstance(target, dict):
            target[draw(st.text(max_size=8))] = draw(VALUES)
        elif change == "remove":
            del target[path[-1]]
        else:
            target[path[-1]] = draw(VALUES)
        if not raw:
            break
    return raw


@given(st.composite(mutated)())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_changed_spec_is_a_spec_or_a_spec_error(raw):
    with suppress(SpecError):
        spec = parse_spec(raw, Path.cwd(), "spec")

        assert parse_spec(spec.model_dump(mode="json"), Path.home(), "spec") == spec


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_damaged_file_is_a_spec_or_a_spec_error(suffix, data, tmp_path_factory):
    text = json.dumps(GOOD)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 10)))
    path = tmp_path_factory.mktemp("spec") / f"spec.{suffix}"
    path.write_text(
        text[:start] + data.draw(st.text(max_size=5)) + text[stop:], encoding="utf-8", errors="replace"
    )

    with suppress(SpecError):
        assert isinstance(load_spec(path), PipelineSpec)


@given(st.text(max_size=30))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_override_is_followed_or_refused(text):
    with suppress(SpecError):
        parse_spec(GOOD, Path.cwd(), "spec", [text])
