"""Numbers: what people report, and what they see here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft_adapters import adapted
from safetensors.torch import load_file, save_file
from small_models import clip_tower, expert, llama, rewritten, run, saved, spec_of, tensors_in
from torch import Tensor

import merging
from merging.components import strategies
from merging.errors import CheckpointError, NumericalError
from merging.pipeline import Pipeline
from merging.report.report import Report

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
METHODS: dict[str, dict[str, Any]] = {
    "regmean": {"merge": {"type": "regmean"}},
    "regmean_plus_plus": {"merge": {"type": "regmean_plus_plus"}},
    "chain_of_merges": {"merge": {"type": "chain_of_merges"}},
    "featcal": {"merge": {"type": "average"}, "calibrate": {"type": "featcal"}},
}


def oracle(base: Tensor, experts: list[Tensor], scale: float) -> Tensor:
    """Task arithmetic in float64, rounded once."""
    changes = sum(one.double() - base.double() for one in experts)
    return (base.double() + scale * changes).to(base.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rule", "settings"),
    [("ties", {"density": 1.0}), ("dare", {"density": 1.0, "rescale": "norm"}), ("task_arithmetic", {})],
)
def test_sums_over_a_tensor_of_halves_do_not_overflow(
    dtype: torch.dtype, rule: str, settings: dict[str, Any]
) -> None:
    """160 000 ones are more than float16 can count."""
    base, ones = torch.zeros(400, 400, dtype=dtype), torch.ones(400, 400, dtype=dtype)

    found = merging.merge(rule, {"w": base}, {"a": {"w": ones}}, scale=0.3, **settings)["w"]

    assert torch.equal(found, oracle(base, [ones], 0.3))


def test_norms_of_billions_stay_finite_in_bfloat16() -> None:
    base, far = torch.zeros(64, 64, dtype=torch.bfloat16), torch.full((64, 64), 4e9, dtype=torch.bfloat16)

    for rule in ("dare", "ties", "slerp", "karcher", "tsv_m", "iso_c"):
        settings = {"dare": {"rescale": "norm"}, "ties": {}}.get(rule, {})
        found = merging.merge(rule, {"w": base}, {"a": {"w": far}}, **settings)["w"]
        assert torch.isfinite(found).all(), rule


def test_small_changes_of_wide_experts_survive_a_bfloat16_base() -> None:
    torch.manual_seed(0)
    base = torch.ones(64, 64, dtype=torch.bfloat16)
    experts = [1 + 0.003 * torch.randn(64, 64) for _ in range(8)]
    named = {str(place): {"w": one} for place, one in enumerate(experts)}

    found = merging.merge("task_arithmetic", {"w": base}, named, scale=0.3)["w"]
    mean = merging.merge("average", {"w": base}, named)["w"]

    assert torch.equal(found, oracle(base, experts, 0.3))
    assert torch.equal(mean, oracle(base, experts, 1 / 8))


@pytest.mark.parametrize(
    ("asked", "stored"), [(None, "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")]
)
def test_the_result_has_the_dtype_that_was_asked_for_or_the_bases(
    tmp_path: Path, asked: str | None, stored: str
) -> None:
    base = llama()
    experts = {}
    for seed, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32), start=1):
        experts[f"e{seed}"] = saved(expert(base, seed).to(dtype), tmp_path / f"e{seed}")
    saved(base.to(torch.bfloat16), tmp_path / "base")
    output = {"shard_size": "40kB", **({} if asked is None else {"dtype": asked})}
    spec = spec_of(tmp_path / "base", experts, output=output)

    plan = Pipeline.from_spec(spec).plan()
    folder = run(tmp_path / "out", spec)

    assert plan.storage_dtype == stored
    assert plan.compute_dtype == "float32 or wider"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = {
        name: tensor
        for file in set(index["weight_map"].values())
        for name, tensor in load_file(folder / file).items()
    }
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{stored}"}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert json.loads((folder / "config.json").read_text())["dtype"] == stored
    loaded = hf.AutoModelForCausalLM.from_pretrained(folder)
    assert str(loaded.dtype) == f"torch.{stored}"


def calibrated(
    folder: Path, out: Path, inputs: dict[str, Tensor], experts: list[str], **changes: Any
) -> Report:
    """A run on these examples, the same for each expert; `folder` holds base and experts."""
    save_file(inputs, folder / "examples.safetensors")
    examples = {"type": "tensors", "path": str(folder / "examples.safetensors")}
    tasks = {name: {"calibration": examples} for name in experts}
    spec = spec_of(folder / "base", {name: folder / name for name in experts}, tasks=tasks, **changes)
    return Pipeline.from_spec(spec).run(out)


@pytest.mark.parametrize("method", METHODS)
def test_dead_and_huge_features_do_not_end_a_calibration_and_the_report_tells_each_solve(
    tmp_path: Path, method: str
) -> None:
    norm, dead, huge = "encoder.layers.0.layer_norm1", 3, 5
    base = clip_tower()
    for seed, name in enumerate(("base", "one", "two")):
        model = expert(base, seed) if seed else base
        with torch.no_grad():
            weight, bias = (model.get_parameter(f"{norm}.{leaf}") for leaf in ("weight", "bias"))
            weight[dead] = bias[dead] = 0.0
            weight[huge] *= 1e4
        saved(model, tmp_path / name)
    pixels = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    report = calibrated(
        tmp_path, tmp_path / "out", {"pixel_values": pixels}, ["one", "two"], **METHODS[method]
    )

    found = tensors_in(Path(report.checkpoint))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found.values())
    query = "encoder.layers.0.self_attn.q_proj.weight"
    one, two, start = (tensors_in(tmp_path / name)[query][:, dead] for name in ("one", "two", "base"))
    mean = (one + two) / 2
    anchors = {"chain_of_merges": start, "featcal": start + 2.2 * (mean - start)}
    assert torch.allclose(found[query][:, dead], anchors.get(method, mean), atol=1e-4)
    assert any("layers.0.self_attn.q_proj" in row.module for row in report.solver)
    for row in report.solver:
        assert row.condition >= 1
        assert row.tokens > 0
        assert row.ridge >= 0
        assert row.residual < 1e-2


def t5(wo: float) -> Any:
    torch.manual_seed(0)
    model = hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("wo.weight"):
                parameter *= wo
    return model


def halves(folder: Path, wo: float) -> dict[str, Tensor]:
    """Base and two experts of T5 in float16, and texts."""
    base = t5(wo)
    saved(base.half(), folder / "base")
    for seed, name in enumerate(("one", "two"), start=1):
        saved(expert(base.float(), seed).half(), folder / name)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (6, 9), generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "decoder_input_ids": ids[:, :4].contiguous(),
    }


@pytest.mark.parametrize("method", ["regmean", "featcal"])
def test_a_t5_in_float16_is_run_in_float32(tmp_path: Path, method: str) -> None:
    """Its feed-forward outputs are beyond what float16 can hold."""
    texts = halves(tmp_path, 5e4)

    report = calibrated(tmp_path, tmp_path / "out", texts, ["one", "two"], **METHODS[method])

    found = tensors_in(Path(report.checkpoint))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found.values())
    assert {tensor.dtype for tensor in found.values()} == {torch.float16}
    assert report.solver


def test_an_activation_that_overflows_stops_with_block_task_and_batch_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    base = clip_tower()
    saved(base, tmp_path / "base")
    saved(expert(base, 1), tmp_path / "one")
    broken = saved(expert(base, 2), tmp_path / "two")
    tensors = tensors_in(broken)
    tensors["encoder.layers.1.mlp.fc1.weight"] *= 1e38
    rewritten(broken, tensors)
    pixels = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    with pytest.raises(
        NumericalError, match=r'not finite \(block "encoder\.layers\.\d", task "two", batch 0\)'
    ):
        calibrated(
            tmp_path,
            tmp_path / "out",
            {"pixel_values": pixels},
            ["one", "two"],
            merge={"type": "regmean"},
            allow=["other_base"],
        )

    assert [path.name for path in (tmp_path / "out").iterdir()] == [".merging"]


NEED_NO_DATA = [
    name
    for name in merging.available("strategies")
    if name not in ("checkpoint", "knots", "core_space") and "data" not in strategies.get(name).needs
]
SPOILT = {
    "nan": ("model.layers.1.mlp.up_proj.weight", float("nan")),
    "inf": ("model.layers.1.input_layernorm.weight", float("inf")),
}


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, base = tmp_path_factory.mktemp("spoilt"), llama()
    saved(base, folder / "base")
    saved(expert(base, 1), folder / "good")
    for kind, (name, value) in SPOILT.items():
        tensors = tensors_in(saved(expert(base, 2), folder / kind))
        tensors[name].flatten()[37 % tensors[name].numel()] = value
        rewritten(folder / kind, tensors)
    return folder


@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize("rule", NEED_NO_DATA)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_no_rule_lets_a_value_that_is_not_finite_through_or_hides_it(
    spoilt: Path, tmp_path: Path, rule: str, kind: str
) -> None:
    experts = {"bad": spoilt / kind} if rule == "slerp" else {"good": spoilt / "good", "bad": spoilt / kind}

    with pytest.raises(CheckpointError) as caught:
        run(tmp_path / "out", spec_of(spoilt / "base", experts, {"type": rule}))

    assert f'expert "bad": {SPOILT[kind][0]}: 1 values are NaN or infinite' in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out" / "merged").exists()


@pytest.mark.parametrize("rule", ["knots", "core_space", "task_arithmetic"])
def test_an_adapter_with_a_value_that_is_not_finite_is_named(tmp_path: Path, rule: str) -> None:
    saved(llama(), tmp_path / "base")
    for seed, name in enumerate(("good", "bad")):
        adapted(llama(), tmp_path / name, seed=seed, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    file = tmp_path / "bad" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[min(tensors)][0, 0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    experts = {name: {"adapter": str(tmp_path / name)} for name in ("good", "bad")}

    with pytest.raises(CheckpointError, match=r'expert "bad": model\.layers\.0\.self_attn\.q_proj\.weight'):
        run(tmp_path / "out", spec_of(tmp_path / "base", experts, {"type": rule}))
