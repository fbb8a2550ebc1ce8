"""`--set PATH=VALUE`."""

from __future__ import annotations

import pytest

from merging.errors import SpecError
from merging.spec import parse_spec
from merging.spec.overrides import parse_set


def test_values_are_json_or_text():
    assert parse_set("merge.scale=0.4") == (["merge", "scale"], 0.4)
    assert parse_set("merge.type=ties") == (["merge", "type"], "ties")
    assert parse_set("notes=a=b") == (["notes"], "a=b")
    assert parse_set("notes=NaN") == (["notes"], "NaN")
    assert parse_set('plugins=["a"]') == (["plugins"], ["a"])
    assert parse_set("""experts."a.b=c".weight=2""") == (["experts", "a.b=c", "weight"], 2)


def test_overrides_reach_any_key(good, folder):
    sets = [
        "merge.scale=1",
        "output.shard_size=5GB",
        "experts.mnist.weight=2",
        'experts."a.b"=org/ab',
        'tasks."a.b".calibration={"type": "images", "path": "data/svhn"}',
        "calibrate.ridge=0.1",
        "device=cpu",
    ]

    spec = parse_spec(good, folder, "spec", sets)

    assert spec.merge.settings.scale == 1
    assert spec.output.shard_size == 5_000_000_000
    assert spec.experts["mnist"].weight == 2
    assert spec.experts["a.b"].model == "org/ab"
    assert spec.calibrate[0].settings.ridge == 0.1


def test_an_item_of_a_list_is_reached_by_its_position(good, folder):
    good["calibrate"] = [{"type": "featcal"}]

    spec = parse_spec(good, folder, "spec", ["calibrate.0.anchor=1"])

    assert spec.calibrate[0].settings.anchor == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("merge.scale.x=1", '"merge.scale" is the number 0.4'),
        ("merge.scale", "expected PATH=VALUE"),
        ("=1", "expected PATH=VALUE"),
        ("merge..scale=1", "expected PATH=VALUE"),
        ("plugins.3=a", '"plugins" is a list; "3" is not a position'),
    ],
)
def test_paths_that_lead_nowhere_are_named(text, words, good, folder):
    with pytest.raises(SpecError, match="--set") as caught:
        parse_spec({**good, "plugins": []}, folder, "spec", [text])

    assert words in caught.value.problems[0].what


def test_a_misspelt_path_is_an_unknown_key(good, folder):
    with pytest.raises(SpecError, match=r"(?s)merge\.scael: unknown key.*\"scale\""):
        parse_spec(good, folder, "spec", ["merge.scael=1"])


def test_the_given_dict_is_left_alone(good, folder):
    parse_spec(good, folder, "spec", ["merge.scale=1"])

    assert good["merge"]["scale"] == 0.4
