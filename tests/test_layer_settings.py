"""Settings that differ by part of the model: what a tensor gets, what is said of it, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_pipeline import run, spec_of, weights, workshop  # noqa: F401
from tiny_models import expert_of, made, same_data

import merging
from merging.components import strategies
from merging.errors import SpecError
from merging.layer_settings import LayerEntry, LayerSettings
from merging.pipeline import Pipeline
from merging.spec import parse_spec, schema

BASE = {name: torch.zeros(20, 10) for name in ("embed.w", "0.attn.q", "0.attn.k", "0.mlp.w", "1.attn.q")}
EXPERTS = {task: {name: torch.randn(20, 10) for name in BASE} for task in "abc"}
ATTENTION = "*attn*"


def merge(rule: str, layers: list[dict[str, Any]] | None = None, **settings: Any) -> dict[str, torch.Tensor]:
    more = {} if layers is None else {"layers": layers}
    return merging.merge(rule, BASE, EXPERTS, **settings, **more)


@pytest.mark.parametrize(
    ("rule", "settings", "other"),
    [
        ("task_arithmetic", {"scale": 0.3}, {"scale": 0.7}),
        ("ties", {"density": 0.2}, {"density": 0.5, "trim": "tensor"}),
        ("ties", {"density": 0.2, "elect": "normfrac"}, {"density": 0.9}),
        ("dare_ties", {"density": 0.5, "trim": 0.5}, {"trim": 0.2}),
        ("della", {}, {"density": 0.7, "epsilon": 0.1}),
        ("sce", {}, {"density": 0.5}),
    ],
)
def test_a_tensor_gets_what_a_merge_with_its_settings_gives(rule, settings, other):
    mixed = merge(rule, [{"match": ATTENTION, **other}], **settings)

    here, there = merge(rule, **settings), merge(rule, **{**settings, **other})
    for name, tensor in mixed.items():
        assert torch.equal(tensor, (there if "attn" in name else here)[name])


def test_later_entries_win_setting_by_setting():
    layers = [{"match": ATTENTION, "density": 0.5, "scale": 2.0}, {"match": "1.*", "density": 0.9}]

    mixed = merge("ties", layers)

    assert torch.equal(mixed["0.attn.q"], merge("ties", density=0.5, scale=2.0)["0.attn.q"])
    assert torch.equal(mixed["1.attn.q"], merge("ties", density=0.9, scale=2.0)["1.attn.q"])


def test_what_is_left_out_is_the_bases_and_counts_for_nothing():
    loud = {task: {**expert, "embed.w": 1e6 * expert["embed.w"]} for task, expert in EXPERTS.items()}

    found = merging.merge("ties", BASE, loud, layers=[{"match": "embed.*", "leave_out": True}])

    rest = {name: tensor for name, tensor in BASE.items() if name != "embed.w"}
    alone = {task: {name: expert[name] for name in rest} for task, expert in EXPERTS.items()}
    assert torch.equal(found["embed.w"], BASE["embed.w"])
    assert all(
        torch.equal(found[name], tensor) for name, tensor in merging.merge("ties", rest, alone).items()
    )


def test_a_later_entry_takes_leaving_out_back():
    layers = [{"match": "*", "leave_out": True}, {"match": "0.mlp.*", "leave_out": False, "scale": 0.5}]

    found = merge("task_arithmetic", layers)

    assert torch.equal(found["0.mlp.w"], merge("task_arithmetic", scale=0.5)["0.mlp.w"])
    assert not any(found[name].any() for name in found if name != "0.mlp.w")


@given(st.lists(st.tuples(st.sampled_from(["*", "0.*", ATTENTION, "*.q"]), st.floats(-2, 2)), max_size=5))
def test_the_last_entry_that_matches_decides(entries):
    layers = LayerSettings(
        tuple(LayerEntry(match=match, changes={"scale": scale}) for match, scale in entries)
    )
    default = strategies.get("task_arithmetic").Settings()

    for name in BASE:
        scales = [scale for match, scale in entries if LayerEntry(match=match).matches(name)]
        wanted = scales[-1] if scales else default.scale
        assert layers.settings_for(name, default).scale == wanted


def test_a_users_rule_needs_to_know_nothing_of_it(monkeypatch):
    monkeypatch.setattr(strategies, "_classes", dict(strategies._classes))  # registered for this test only

    @merging.strategy("scaled_for_layers")
    class Scaled(merging.TensorMerger):
        """The mean, scaled."""

        class Settings(merging.Settings):
            scale: float = 1.0

        def combine(self, name, base_S, deltas_NS):
            return base_S + self.settings.scale * deltas_NS.mean(dim=0)

    found = merge("scaled_for_layers", [{"match": ATTENTION, "scale": 0.0}])

    assert [bool(tensor.any()) for tensor in found.values()] == ["attn" not in name for name in found]


@pytest.mark.parametrize("rule", ["regmean", "regmean_plus_plus"])
def test_a_layerwise_rule_solves_each_linear_with_its_own_shrink(rule):
    backbone, model, batches = made("clip")
    experts = {"a": expert_of(model, 1), "b": expert_of(model, 2)}

    def solved(**settings: Any) -> dict[str, torch.Tensor]:
        return merging.merge(
            rule, model, experts, data=same_data(experts, *batches), backbone=backbone, **settings
        )

    first = "encoder.layers.0.self_attn."
    layers = [{"match": "*q_proj*", "shrink": 0.0}, {"match": "*fc2*", "leave_out": True}]
    mixed = solved(shrink=0.9, layers=layers)

    here, there, base = solved(shrink=0.9), solved(shrink=0.0), model.state_dict()
    assert torch.allclose(mixed[f"{first}q_proj.weight"], there[f"{first}q_proj.weight"], atol=1e-6)
    assert torch.allclose(mixed[f"{first}k_proj.weight"], here[f"{first}k_proj.weight"], atol=1e-6)
    assert not torch.allclose(there[f"{first}k_proj.weight"], here[f"{first}k_proj.weight"], atol=1e-6)
    assert all(torch.equal(mixed[name], base[name]) for name in mixed if "fc2" in name)


def test_leaving_out_is_for_every_rule():
    backbone, model, batches = made("clip")
    experts = {"a": expert_of(model, 1), "b": expert_of(model, 2)}
    head = merging.data.task.LinearHead(torch.randn(3, 32))

    found = merging.merge(
        "fisher",
        model,
        experts,
        data=same_data(experts, *batches),
        heads=dict.fromkeys(experts, head),
        backbone=backbone,
        layers=[{"match": "embeddings.*", "leave_out": True}],
    )

    base = model.state_dict()
    same = {name for name in found if torch.equal(found[name], base[name])}
    assert same == {name for name in found if name.startswith("embeddings.")}
    with pytest.raises(SpecError, match=r"layers\[0\]\.floor: holds for the whole model[\s\S]*leave_out"):
        merging.merge("fisher", model, experts, layers=[{"match": "*", "floor": 0.1}])


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([{"match": ATTENTION, "densty": 0.5}], r'layers\[0\]\.densty: unknown key\s+did you mean "density"'),
        ([{"match": "*"}, {"match": "*", "density": 3}], r"layers\[1\]\.density: .*at most 1"),
        ([{"density": 0.5}], r"layers\[0\]\.match: missing"),
        ([{"match": ATTENTION}], r"layers\[0\]: changes nothing"),
        (
            [{"match": "*", "leave_out": True, "scale": 1.0}],
            r"layers\[0\]: leaves tensors out and sets scale",
        ),
        (
            [{"match": "attn", "scale": 1.0}],
            r'layers\[0\]\.match: "attn" matches none of the 5.*\s+did you mean "\*attn\*"',
        ),
        ([{"match": "zzz", "scale": 1.0}], r"names are like embed\.w, 0\.attn\.q"),
        (
            [{"match": "*", "leave_out": True}, {"match": ATTENTION, "scale": 1.0}],
            r'layers\[1\]: all 3 tensors that "\*attn\*" matches are left out\s+Take that back',
        ),
        ({"match": "*"}, r"layers: found an object, expected a list"),
        ([3], r"layers\[0\]: found the number 3, expected an object"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(layers, words):
    with pytest.raises(SpecError, match=words):
        merge("ties", layers)


def test_settings_that_the_rule_itself_refuses(workshop: Path):  # noqa: F811
    layers = [{"match": "*mlp*", "epsilon": 0.45, "density": 0.4}]

    with pytest.raises(SpecError, match=r"merge\.layers\[0\]: density - epsilon = -0\.05 and density \+"):
        parse_spec(spec_of(workshop, merge={"type": "della", "layers": layers}), Path.cwd(), "s")


def test_calibrators_have_no_layers(workshop: Path):  # noqa: F811
    with pytest.raises(SpecError, match=r"calibrate\.layers: unknown key"):
        parse_spec(spec_of(workshop, calibrate={"type": "featcal", "layers": []}), Path.cwd(), "s")


LAYERS = [{"match": "*self_attn*", "scale": 0.5}, {"match": "embeddings.*", "leave_out": True}]


def test_a_run_with_layers_says_so_everywhere(workshop: Path, tmp_path: Path):  # noqa: F811
    merge = {"type": "task_arithmetic", "scale": 0.2, "layers": LAYERS}

    report = run(workshop, tmp_path / "out", calibrate=[], merge=merge)

    found, plain = weights(tmp_path / "out" / "merged"), tmp_path / "plain"
    run(workshop, plain, calibrate=[], merge={"type": "task_arithmetic", "scale": 0.5})
    same = weights(plain / "merged")
    assert all(torch.equal(found[name], same[name]) for name in found if "self_attn" in name)
    manifest = json.loads((tmp_path / "out" / "merged" / "manifest.json").read_text())
    assert manifest["spec"]["merge"]["layers"] == LAYERS
    assert '"*self_attn*"' in (tmp_path / "out" / "merged" / "README.md").read_text()
    assert report.parameters["embeddings.class_embedding"].reason == "left out in merge.layers"
    assert parse_spec(manifest["spec"], Path.cwd(), "again").canonical()["merge"]["layers"] == LAYERS


def test_other_layers_are_another_spec(workshop: Path, tmp_path: Path):  # noqa: F811
    from merging.errors import OutputError

    run(workshop, tmp_path / "out", calibrate=[], merge={"type": "ties", "layers": LAYERS[1:]})

    with pytest.raises(OutputError, match="made from another spec"):
        run(workshop, tmp_path / "out", calibrate=[], merge={"type": "ties"})


def test_a_plan_counts_what_each_entry_matches(workshop: Path):  # noqa: F811
    plan = Pipeline.from_spec(spec_of(workshop, merge={"type": "ties", "layers": LAYERS})).plan()

    assert [(one.match, one.tensors) for one in plan.layers] == [("*self_attn*", 24), ("embeddings.*", 3)]


def test_an_entry_that_matches_nothing_is_found_before_any_weight_is_read(workshop: Path):  # noqa: F811
    layers = [{"match": "*attention*", "density": 0.5}]

    with pytest.raises(
        SpecError, match=r'merge\.layers\[0\]\.match: "\*attention\*" matches none of the \d+'
    ):
        Pipeline.from_spec(spec_of(workshop, merge={"type": "ties", "layers": layers})).validate()


def test_a_value_of_an_entry_can_be_set_from_outside(workshop: Path):  # noqa: F811
    spec = spec_of(workshop, merge={"type": "task_arithmetic", "layers": LAYERS})

    pipeline = Pipeline.from_spec(spec, sets=["merge.layers.0.scale=0.9"])

    assert pipeline.spec.merge.layers[0].changes == {"scale": 0.9}


def test_the_schema_knows_what_an_entry_may_say():
    methods = {form["title"]: form for form in schema()["properties"]["merge"]["oneOf"] if "title" in form}

    entries = {
        name: methods[name]["properties"]["layers"]["items"]["properties"]
        for name in ("ties", "fisher", "regmean")
    }

    assert entries["ties"].keys() == {"match", "leave_out", "scale", "density", "trim", "elect", "merge"}
    assert entries["fisher"].keys() == {"match", "leave_out"}
    assert entries["regmean"].keys() == {"match", "leave_out", "shrink"}
    assert "default" not in entries["ties"]["density"]
