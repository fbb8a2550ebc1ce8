"""Architectures and kinds of modules: what people report, and what they see here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from routed_models import routed_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import (
    PICTURE,
    SIZE,
    added_up,
    expert,
    llama,
    rewritten,
    run,
    saved,
    spec_of,
    tensors_in,
    vit_classifier,
)
from tiny_models import CASES, expert_of, made, opened, pixels, same_data, tokens
from torch import Tensor, nn

import merging
from merging.averaging import AverageSource
from merging.backbones.transformers import AnyTransformers
from merging.backbones.vit import ViT
from merging.calibrators.featcal import FeatCal
from merging.checkpoints.sink import StateDictSink
from merging.errors import CheckpointError
from merging.pipeline import Pipeline
from merging.report.table import render
from merging.strategies.regmean import RegMean
from merging.tracer import is_transposed


def data_of(folder: Path, batch: Mapping[str, Tensor], *tasks: str) -> dict[str, Any]:
    save_file(dict(batch), folder / "examples.safetensors")
    source = {"type": "tensors", "path": str(folder / "examples.safetensors")}
    return {task: {"calibration": source} for task in tasks}


class PlainGPT2(AnyTransformers):
    """GPT-2 with nn.Linear in the place of Conv1D."""

    def skeleton(self) -> nn.Module:
        model = super().skeleton()
        for path, module in list(model.named_modules()):
            if is_transposed(module):
                inputs, outputs = module.weight.shape
                model.set_submodule(path, nn.Linear(inputs, outputs, device="meta"))
        return model


def regmean(backbone: Any, base: Any, experts: Any, batches: Any) -> tuple[dict[str, Tensor], list[str]]:
    models = opened(base, experts, backbone)
    sink = StateDictSink(models.base)
    with sink:
        notes = RegMean().merge(models, same_data(experts, *batches), sink)
    return sink.tensors, notes["solved"]


def test_conv1d_of_gpt2_is_merged_like_the_linear_that_it_is() -> None:
    backbone, model, batches = made("gpt2")
    turned = [f"{path}.weight" for path, part in model.named_modules() if is_transposed(part)]
    experts = {"a": expert_of(model, 1), "b": expert_of(model, 2)}

    def plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.T.contiguous() if name in turned else x for name, x in state.items()}

    found, solved = regmean(backbone, model.state_dict(), experts, batches)
    wanted, solved_plain = regmean(
        PlainGPT2(model.config), plain(model.state_dict()), {k: plain(x) for k, x in experts.items()}, batches
    )

    assert solved == solved_plain
    assert set(turned) <= set(solved)
    assert max(float((plain(found)[name] - wanted[name]).abs().max()) for name in wanted) < 1e-4


class ViTWithoutShifts(ViT):
    """A ViT whose norms have no bias."""

    def skeleton(self) -> nn.Module:
        model = super().skeleton()
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.LayerNorm):
                norm = nn.LayerNorm(module.normalized_shape, eps=module.eps, bias=False, device="meta")
                model.set_submodule(path, norm)
        return model


@pytest.mark.parametrize("name", ["llama", "gemma3", "t5", "vit without shifts"])
def test_norms_without_bias_are_solved_for_their_scale(name: str) -> None:
    backbone, model, batches = made(name.split()[0])
    base = dict(model.state_dict())
    if name == "vit without shifts":
        backbone = ViTWithoutShifts(model.config)
        base = {key: x for key, x in base.items() if not ("layernorm" in key and key.endswith("bias"))}
    experts = {
        task: {key: x for key, x in expert_of(model, seed).items() if key in base}
        for seed, task in enumerate("ab", start=1)
    }
    models = opened(base, experts, backbone)
    sink = StateDictSink(models.base)

    with sink:
        notes = FeatCal().calibrate(AverageSource(models), models, same_data(experts, *batches), sink)

    norms = [key for key in base if "norm" in key and any(part.isdecimal() for part in key.split("."))]
    assert norms
    assert set(norms) <= set(notes["solved"])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in sink.tensors.values())


def test_weights_of_no_known_architecture_are_merged_and_other_methods_say_what_they_lack(
    tmp_path: Path,
) -> None:
    states = {}
    for seed, name in enumerate(("base", "a", "b")):
        (tmp_path / name).mkdir()
        torch.manual_seed(0)
        start = {"odd.core": torch.randn(4, 6), "odd.list.0.w": torch.randn(3)}
        torch.manual_seed(seed)
        states[name] = {key: x + 0.02 * torch.randn(x.shape) for key, x in start.items()}
        save_file(states[name], tmp_path / name / "model.safetensors")
    experts = {name: tmp_path / name for name in "ab"}

    result = tensors_in(run(tmp_path / "out", spec_of(tmp_path / "base", experts)))
    regmean = spec_of(tmp_path / "base", experts, {"type": "regmean"})
    regmean["tasks"] = data_of(tmp_path, {"x": torch.zeros(2, 3)}, "a", "b")

    wanted = added_up(states["base"], [states["a"], states["b"]], 0.3)
    assert all(torch.allclose(result[key].double(), wanted[key], atol=1e-6) for key in wanted)
    with pytest.raises(CheckpointError, match=r'"regmean" cannot run the model: .* has no config\.json'):
        Pipeline.from_spec(regmean).validate()


@pytest.mark.parametrize("name", CASES)
def test_averaging_needs_no_table_of_architectures(name: str) -> None:
    _, model, _ = made(name)
    experts = {"a": expert_of(model, 1), "b": expert_of(model, 2)}

    result = merging.merge("average", model.state_dict(), experts)

    assert result.keys() == model.state_dict().keys()
    assert all(
        torch.allclose(x, (experts["a"][key] + experts["b"][key]) / 2, atol=1e-6)
        for key, x in result.items()
        if x.is_floating_point()
    )


@pytest.mark.parametrize("rule", ["task_arithmetic", "regmean"])
def test_a_tensor_that_no_table_knows_is_in_the_output(rule: str, tmp_path: Path) -> None:
    extra = "model.layers.0.self_attn.q_norm.weight"
    for seed, name in enumerate(("base", "a", "b")):
        saved(llama() if not seed else expert(llama(), seed), tmp_path / name)
        rewritten(tmp_path / name, {**tensors_in(tmp_path / name), extra: torch.full((8,), float(seed))})
    experts = {name: tmp_path / name for name in "ab"}
    spec = spec_of(tmp_path / "base", experts, {"type": rule})
    spec["tasks"] = data_of(tmp_path, tokens(3, 7), "a", "b")

    result = tensors_in(run(tmp_path / "out", spec))

    assert result.keys() == tensors_in(tmp_path / "base").keys()
    factor = 0.3 * 3 if rule == "task_arithmetic" else 1.5
    assert torch.allclose(result[extra], torch.full((8,), factor))


def test_heads_with_different_numbers_of_classes_are_kept_and_score_their_own_task(tmp_path: Path) -> None:
    base = hf.ViTModel(hf.ViTConfig(**SIZE, **PICTURE)).eval()
    saved(base, tmp_path / "base")
    spec = spec_of(tmp_path / "base", {}, {"type": "average"}, tasks={})
    heads = {}
    for classes, task in ((3, "three"), (5, "five")):
        model = vit_classifier(classes, seed=classes)
        tower = {
            f"vit.{key}": x for key, x in expert(base, classes).state_dict().items() if "pooler" not in key
        }
        model.load_state_dict(tower, strict=False)
        heads[task] = model.classifier.weight.detach().clone()
        saved(model, tmp_path / task)
        labels = torch.arange(6) % classes
        save_file({**pixels(6), "labels": labels}, tmp_path / f"{task}.safetensors")
        spec["experts"][task] = str(tmp_path / task)
        test = {"type": "tensors", "path": str(tmp_path / f"{task}.safetensors")}
        spec["tasks"][task] = {"test": test}

    report = Pipeline.from_spec(spec).run(tmp_path / "out")

    for task, weight in heads.items():
        assert torch.equal(load_file(tmp_path / "out" / "heads" / f"{task}.safetensors")["weight"], weight)
        assert report.tasks[task].scores.merged is not None
    hf.ViTModel.from_pretrained(tmp_path / "out" / "merged")


def test_integers_and_masks_are_the_bases_and_running_statistics_are_flagged(tmp_path: Path) -> None:
    def network(seed: int) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        model.register_buffer("position_ids", torch.arange(5)[None])
        model.register_buffer("mask", torch.tensor([True, False, True]))
        torch.manual_seed(seed)
        model(torch.randn(2 + seed, 3, 8, 8))
        return model

    for seed, name in enumerate(("base", "a", "b")):
        (tmp_path / name).mkdir()
        save_file(network(seed).state_dict(), tmp_path / name / "model.safetensors")
    spec = spec_of(tmp_path / "base", {name: tmp_path / name for name in "ab"}, {"type": "average"})

    report = Pipeline.from_spec(spec).run(tmp_path / "out")

    result, base = tensors_in(tmp_path / "out" / "merged"), tensors_in(tmp_path / "base")
    for name in ("position_ids", "mask", "1.num_batches_tracked"):
        assert torch.equal(result[name], base[name])
        assert result[name].dtype == base[name].dtype
        assert report.parameters[name].reason == "not floating point"
    assert any("2 running statistics of batch norms (1.running_mean" in one for one in report.warnings)
    network(0).load_state_dict(result, strict=True)


def moe_suite(folder: Path, merge: Any, **changes: Any) -> dict[str, Any]:
    """Mixtral, two experts of it, and examples."""
    _, model = routed_model("mixtral")
    model.save_pretrained(folder / "base")
    for seed, task in enumerate("ab", start=1):
        saved(expert(model, seed), folder / task)
    spec = spec_of(folder / "base", {task: folder / task for task in "ab"}, merge, **changes)
    return {**spec, "tasks": data_of(folder, tokens(6, 12), "a", "b")}


def test_a_mixture_of_experts_keeps_the_names_that_it_is_stored_under(tmp_path: Path) -> None:
    spec = moe_suite(tmp_path, {"type": "task_arithmetic", "scale": 0.3}, tasks={})

    out = run(tmp_path / "out", spec)

    base, *experts = (tensors_in(tmp_path / name) for name in ("base", "a", "b"))
    result, wanted = tensors_in(out), added_up(base, experts, 0.3)
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in result
    assert result.keys() == base.keys()
    assert all(torch.allclose(result[name].double(), wanted[name], atol=1e-6) for name in base)
    hf.MixtralForCausalLM.from_pretrained(out)


@pytest.mark.parametrize("rule", ["regmean", "regmean_plus_plus", "chain_of_merges"])
def test_routed_experts_are_solved_by_rules_that_run_models(rule: str, tmp_path: Path) -> None:
    spec = moe_suite(tmp_path, {"type": rule}, calibrate={"type": "featcal"})

    pipeline = Pipeline.from_spec(spec)
    planned = pipeline.plan().parameters
    report = pipeline.run(tmp_path / "out")

    assert report.parameters == planned
    for part in ("gate", "experts.0.w1", "experts.3.w2"):
        assert report.parameters[f"model.layers.1.block_sparse_moe.{part}.weight"].state == "solved"
    with safe_open(tmp_path / "out" / "calibrated" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == tensors_in(tmp_path / "base").keys()
    hf.MixtralForCausalLM.from_pretrained(tmp_path / "out" / "calibrated")


def test_experts_that_were_saved_fused_are_merged_only_and_listed(tmp_path: Path) -> None:
    spec = moe_suite(tmp_path, {"type": "regmean"})
    for name in ("base", "a", "b"):
        model = hf.MixtralForCausalLM.from_pretrained(tmp_path / name)
        model.save_pretrained(tmp_path / name, save_original_format=False)

    report = Pipeline.from_spec(spec).run(tmp_path / "out")

    fused = report.parameters["model.layers.0.mlp.experts.gate_up_proj"]
    assert (fused.state, fused.reason) == ("merged", "neither a linear nor a norm: MixtralExperts")
    assert report.parameters["model.layers.0.mlp.gate.weight"].state == "solved"


def test_an_expert_that_no_token_reaches_is_in_manifest_report_and_summary(tmp_path: Path) -> None:
    spec = moe_suite(tmp_path, {"type": "average"}, calibrate={"type": "featcal"})
    for name in ("base", "a", "b"):
        state = tensors_in(tmp_path / name)
        state["model.embed_tokens.weight"][:, 0] = 30.0
        for layer in range(2):
            gate = state[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
            gate[:, 0], gate[3], gate[3, 0] = 0.0, 0.0, -50.0
        rewritten(tmp_path / name, state)

    report = Pipeline.from_spec(spec).run(tmp_path / "out")

    merged, calibrated = (tensors_in(tmp_path / "out" / stage) for stage in ("merged", "calibrated"))
    manifest = json.loads((tmp_path / "out" / "calibrated" / "manifest.json").read_text())
    for leaf in ("w1", "w2", "w3"):
        name = f"model.layers.0.block_sparse_moe.experts.3.{leaf}.weight"
        assert torch.equal(calibrated[name], merged[name])
        assert "n = 0" in manifest["parameters"][name]["reason"]
        assert "n = 0" in report.parameters[name].reason
    summary = " ".join(render(report).split())
    assert (
        "no token of the calibration examples reached model.layers.0.block_sparse_moe.experts.3.w1" in summary
    )
    assert ": not calibrated (n = 0): no token of the examples reaches it" in summary
    assert all(bool(torch.isfinite(x).all()) for x in calibrated.values())
