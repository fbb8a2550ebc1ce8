"""What the rules for matrices share: TSV-M, ISO-C, ISO-CTS and WUDI."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers as hf
from tiny_models import GROUPED, PICTURE, SIZE, TEXT, expert_of
from torch import Tensor

import merging
from merging.checkpoints.source import StateDictSource
from merging.errors import SpecError
from merging.matrix_merger import transposed_weights

RULES = ("tsv_m", "iso_c", "iso_cts", "wudi")
SHAPES = {
    "conv": (6, 3, 3, 3),
    "tall": (24, 16),
    "wide": (10, 30),
    "square": (12, 12),
    "row": (1, 40),
    "column": (7, 1),
    "small": (2, 3),
    "text_projection": (8, 8),
    "bias": (24,),
    "scalar": (),
    "empty": (0, 5),
    "hollow": (5, 0),
}
SETTINGS = {"plain": {}, "everywhere": {"others": "mean", "skip": [], "kernels": True}}
MODELS = {
    "clip": lambda: hf.CLIPModel(
        hf.CLIPConfig(
            text_config={**SIZE, **TEXT, "max_position_embeddings": 16},
            vision_config={**SIZE, **PICTURE},
            projection_dim=16,
        )
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64)
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    ),
}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state(seed: int, around: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    tensors = {name: drawn(seed + i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}
    if around is not None:
        tensors = {name: around[name] + 0.02 * tensor for name, tensor in tensors.items()}
    return {**tensors, "position_ids": torch.arange(seed, seed + 9)[None]}


def experts_near(base: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    return {name: state(100 * i, around=base) for i, name in enumerate("abc", start=1)}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor], *names: str) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in names or SHAPES)


@pytest.fixture(params=SETTINGS)
def settings(request):
    return SETTINGS[request.param]


@pytest.mark.parametrize("rule", RULES)
def test_experts_equal_to_the_base_give_the_base(rule, settings):
    base = state(0)

    assert same(merging.merge(rule, base, {"a": base, "b": base}, **settings), base)


@pytest.mark.parametrize("rule", RULES)
def test_scale_zero_gives_the_base(rule, settings):
    base = state(0)

    assert same(merging.merge(rule, base, experts_near(base), scale=0.0, **settings), base)


@pytest.mark.parametrize("rule", RULES)
def test_order_of_experts_changes_nothing(rule, settings):
    base = state(0)
    experts = experts_near(base)

    merged = merging.merge(rule, base, experts, **settings)

    assert same(merged, merging.merge(rule, base, dict(reversed(experts.items())), **settings))


@pytest.mark.parametrize("rule", RULES)
def test_integers_are_the_bases_and_inputs_stay_as_they_were(rule, settings):
    base = state(0)
    experts = experts_near(base)

    merged = merging.merge(rule, base, experts, **settings)

    assert same(merged, base, "position_ids")
    assert same(base, state(0))
    assert all(same(experts[name], again) for name, again in experts_near(base).items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_dtype_is_kept_and_computed_in_float32_or_wider(rule, dtype):
    base, expert = (drawn(seed, 12, 9).to(dtype) for seed in (0, 1))

    merged = merging.merge(rule, {"w": base}, {"a": {"w": expert}, "b": {"w": base}})["w"]

    wide = merging.merge(rule, {"w": base.float()}, {"a": {"w": expert.float()}, "b": {"w": base.float()}})
    assert merged.dtype == dtype
    torch.testing.assert_close(merged.float(), wide["w"], rtol=torch.finfo(dtype).eps + 1e-5, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rule", RULES)
def test_every_tensor_of_a_model_is_finite(rule, model, settings):
    torch.manual_seed(0)
    base = MODELS[model]()
    expert = expert_of(base, 1)
    experts = {"a": expert, "again": expert, "b": expert_of(base, 2), "nothing": base.state_dict()}

    merged = merging.merge(rule, base, experts, **settings)

    assert all(torch.isfinite(tensor).all() for tensor in merged.values())
    base.load_state_dict(merged)


@pytest.mark.parametrize("rule", RULES)
def test_others_are_the_average_or_the_base(rule):
    base = state(0)
    experts = experts_near(base)
    others = ("conv", "text_projection", "bias", "scalar")

    averaged = merging.merge(rule, base, experts, others="mean", skip=["projection"])
    kept = merging.merge(rule, base, experts, others="base", skip=["projection"])

    average = merging.merge("average", base, experts)
    torch.testing.assert_close({n: averaged[n] for n in others}, {n: average[n] for n in others})
    assert same(kept, base, *others)
    assert same(averaged, kept, "tall", "wide", "square", "row")
    assert not torch.equal(kept["tall"], base["tall"])


@pytest.mark.parametrize("rule", RULES)
def test_kernels_are_merged_as_outputs_by_the_rest(rule):
    base = state(0)
    experts = experts_near(base)

    merged = merging.merge(rule, base, experts, kernels=True)["conv"]

    flat = {name: {"conv": expert["conv"].flatten(1)} for name, expert in experts.items()}
    alone = merging.merge(rule, {"conv": base["conv"].flatten(1)}, flat)["conv"]
    assert torch.equal(merged, alone.view(6, 3, 3, 3))


@pytest.mark.parametrize("rule", RULES)
def test_gpt2_matrices_are_merged_as_those_of_linears(rule):
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc")
    shapes = dict(zip(names, [(8, 24), (8, 8), (8, 32)], strict=True)) | {"mlp.c_proj": (32, 8)}

    def stored(seed: int, *, turned: bool) -> dict[str, Tensor]:
        tensors = {}
        for i, (name, shape) in enumerate(shapes.items()):
            weight = 0.01 * drawn(seed + i, *shape)
            tensors[f"h.0.{name}.weight"] = weight if turned else weight.T.contiguous()
            tensors[f"h.0.{name}.bias"] = torch.zeros(shape[1])
        return tensors

    ours = merging.merge(
        rule, stored(0, turned=True), {"a": stored(10, turned=True), "b": stored(20, turned=True)}
    )
    linears = merging.merge(
        rule, stored(0, turned=False), {"a": stored(10, turned=False), "b": stored(20, turned=False)}
    )

    for name in shapes:
        weight = f"h.0.{name}.weight"
        torch.testing.assert_close(ours[weight], linears[weight].T, rtol=1e-5, atol=1e-7)


def test_only_gpt2_stores_its_weights_transposed():
    found = {name: transposed_weights(StateDictSource(make())) for name, make in MODELS.items()}

    assert not found["clip"] | found["t5"] | found["llama"]
    assert len(found["gpt2"]) == 2 * 4
    assert "transformer.h.1.attn.c_proj.weight" in found["gpt2"]  # square


@pytest.mark.parametrize("rule", RULES)
def test_weights_are_refused(rule):
    base = state(0)

    with pytest.raises(SpecError, match="does not use weights"):
        merging.merge(rule, base, experts_near(base), weights={"a": 0.5})


def test_importing_rules_does_not_import_torch():
    modules = ", ".join(f"merging.strategies.{rule}" for rule in [*RULES, "lot"])
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
