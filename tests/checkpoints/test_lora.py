"""A base with an adapter reads as what PEFT's own merge makes of the two."""

from __future__ import annotations

import json

import pytest
import torch
from peft_adapters import adapted
from safetensors.torch import load_file, save_file
from torch import nn

from merging.checkpoints.lora import open_adapter
from merging.checkpoints.safetensors import SafetensorsSource
from merging.checkpoints.source import StateDictSource
from merging.errors import CheckpointError

Q = {"target_modules": ["q_proj"]}
VIT_QUERY = ["q_proj", "query"]  # of newer and older releases of transformers
CASES = {
    "llama": ("llama", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "llama, ranks and alphas by pattern": (
        "llama",
        {
            "target_modules": ["q_proj", "v_proj", "o_proj"],
            "rank_pattern": {"layers.0.self_attn.q_proj": 7, "v_proj": 2},
            "alpha_pattern": {"layers.1.*.v_proj": 11, "^model.layers.0.self_attn.o_proj": 1},
        },
    ),
    "llama, rank-stabilised": (
        "llama",
        {**Q, "use_rslora": True, "r": 5, "rank_pattern": {"layers.1.self_attn.q_proj": 9}},
    ),
    "llama, embedding": ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "llama, saved modules": ("llama", {**Q, "modules_to_save": ["embed_tokens", "lm_head", "norm"]}),
    "llama, all linears of one layer": (
        "llama",
        {"target_modules": "all-linear", "layers_to_transform": None, "exclude_modules": ["gate_proj"]},
    ),
    "llama, DoRA": ("llama", {"target_modules": ["q_proj", "up_proj"], "use_dora": True}),
    "llama, eva start": ("llama", {"target_modules": ["k_proj"], "init_lora_weights": "orthogonal"}),
    "clip_vision, patches and biases": (
        "clip_vision",
        {"target_modules": ["q_proj", "fc1", "patch_embedding"], "bias": "all"},
    ),
    "clip_vision, bias of the factors": (
        "clip_vision",
        {"target_modules": ["q_proj", "fc2"], "lora_bias": True},
    ),
    "clip_vision, DoRA": ("clip_vision", {"target_modules": ["out_proj"], "use_dora": True}),
    "clip": ("clip", {"target_modules": ["k_proj", "visual_projection"]}),
    "t5": ("t5", {"target_modules": ["q", "wo", "v"]}),
    "t5, shared embedding": ("t5", {"target_modules": ["q", "shared"]}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "gpt2, layout not said": ("gpt2", {"target_modules": ["c_attn", "c_proj", "wte"]}),
    "gpt2, DoRA": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "vit_classifier": (
        "vit_classifier",
        {"target_modules": [*VIT_QUERY, "fc1", "intermediate.dense"], "modules_to_save": ["classifier"]},
    ),
    "vit_classifier, all biases": (
        "vit_classifier",
        {"target_modules": VIT_QUERY, "modules_to_save": ["classifier"], "bias": "all"},
    ),
    "bert, biases of adapted layers": ("bert", {"target_modules": ["query", "dense"], "bias": "lora_only"}),
    "dinov2": ("dinov2", {"target_modules": ["query", "value", "projection"]}),
    "mixtral": ("mixtral", {"target_modules": ["q_proj", "o_proj"]}),
}


def saved(model: nn.Module, folder):
    """The base as transformers writes it."""
    model.save_pretrained(folder)
    return SafetensorsSource(folder)


def stored(model, source):
    """What is stored under each name, as the module calls it."""
    from merging.checkpoints.names import module_names

    return {inside: name for name, inside in module_names(model, source.names()).renamed.items()}


@pytest.mark.parametrize("case", CASES)
def test_adapter_reads_as_peft_merges_it(tiny, tmp_path, case):
    kind, config = CASES[case]
    model = tiny(kind)
    base = saved(model, tmp_path / "base")
    merged = adapted(model, tmp_path / "adapter", **config)

    source = open_adapter(tmp_path / "adapter", base, model)

    places = stored(model, source)
    assert len(places) > 10
    changed = 0
    for inside, name in places.items():
        found, wanted = source.read(name), merged[inside]
        assert torch.allclose(found.double(), wanted.double(), rtol=1e-5, atol=1e-5), name
        changed += not torch.equal(base.read(name).double(), found.double())
    assert changed


@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_whole_tensor(tiny, tmp_path, case):
    kind, config = CASES[case]
    model = tiny(kind)
    base = saved(model, tmp_path / "base")
    adapted(model, tmp_path / "adapter", **config)

    source = open_adapter(tmp_path / "adapter", base, model)

    for name in source.names():
        whole = source.read(name)
        assert tuple(whole.shape) == source.spec(name).shape
        if whole.ndim:
            part = slice(1, max(2, len(whole) - 1))
            assert torch.allclose(source.read(name, part).double(), whole[part].double(), rtol=1e-12, atol=0)


def test_lengths_of_columns_are_asked_once_for_all_blocks(tiny, tmp_path, monkeypatch):
    model = tiny("gpt2")
    base = saved(model, tmp_path / "base")
    adapted(model, tmp_path / "adapter", **CASES["gpt2, DoRA"][1])
    source = open_adapter(tmp_path / "adapter", base, model)
    name = next(name for name in base.names() if name.endswith("c_attn.weight"))
    whole, reads = source.read(name), []
    read = SafetensorsSource.read
    monkeypatch.setattr(
        SafetensorsSource,
        "read",
        lambda self, name, rows=None: (reads.append(rows), read(self, name, rows))[1],
    )

    parts = [source.read(name, slice(row, row + 4)) for row in range(0, len(whole), 4)]

    assert torch.allclose(torch.cat(parts), whole, rtol=1e-12, atol=0)
    assert len(reads) == len(parts)
    assert None not in reads


@pytest.mark.parametrize("case", ["llama", "clip_vision, patches and biases", "gpt2, layout not said"])
def test_factors_are_what_is_added(tiny, tmp_path, case):
    kind, config = CASES[case]
    model = tiny(kind)
    base = saved(model, tmp_path / "base")
    adapted(model, tmp_path / "adapter", **config)

    source = open_adapter(tmp_path / "adapter", base, model)

    ranks = set()
    for name in base.names():
        change, delta = source.factors(name), source.read(name).double() - base.read(name).double()
        if change is None:
            assert name.endswith("bias")
            continue
        ranks.add(change.rank)
        assert torch.allclose(change.product(), delta.reshape(change.left_OR.shape[0], -1), atol=1e-12)
    assert ranks == {0, 4}


def test_an_adapter_of_older_names_fits_through_the_models_own_renaming(tiny, tmp_path):
    model = tiny("vit")
    base = saved(model, tmp_path / "base")
    merged = adapted(model, tmp_path / "adapter", target_modules=VIT_QUERY)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    old = {
        name.replace("model.layers.", "model.vit.encoder.layer.").replace(
            "attention.q_proj", "attention.attention.query"
        ): t
        for name, t in load_file(file).items()
    }
    save_file(old, file)

    source = open_adapter(tmp_path / "adapter", base, model)

    places = stored(model, source)
    for inside, name in places.items():
        assert torch.allclose(source.read(name).double(), merged[inside].double(), atol=1e-6)


def test_a_pickled_adapter_is_read_as_tensors_only(tiny, tmp_path):
    model = tiny("llama")
    base = saved(model, tmp_path / "base")
    adapted(model, tmp_path / "adapter", **Q)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    safe = open_adapter(tmp_path / "adapter", base, model)
    wanted = {name: safe.read(name) for name in safe.names()}
    torch.save(load_file(file), tmp_path / "adapter" / "adapter_model.bin")
    file.unlink()

    source = open_adapter(tmp_path / "adapter", base, model)

    assert all(torch.equal(source.read(name), tensor) for name, tensor in wanted.items())


def test_a_pickled_adapter_with_code_in_it_is_refused(tiny, tmp_path):
    model = tiny("llama")
    base = saved(model, tmp_path / "base")
    adapted(model, tmp_path / "adapter", **Q)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save({"x": Hostile(tmp_path / "ran")}, tmp_path / "adapter" / "adapter_model.bin")

    with pytest.raises(CheckpointError, match="holds code and not only tensors"):
        open_adapter(tmp_path / "adapter", base, model)

    assert not (tmp_path / "ran").exists()


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return type(self.path).touch, (self.path,)


def test_a_link_out_of_the_adapters_folder_is_refused(tiny, tmp_path):
    model = tiny("llama")
    base = saved(model, tmp_path / "base")
    adapted(model, tmp_path / "adapter", **Q)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.rename(tmp_path / "elsewhere.safetensors")
    file.symlink_to("../elsewhere.safetensors")

    with pytest.raises(CheckpointError, match="link that leads out"):
        open_adapter(tmp_path / "adapter", base, model)


def test_names_of_the_base_are_enough_without_a_model(tmp_path):
    base = StateDictSource({"block.fc.weight": torch.zeros(3, 5), "attn.in_proj_weight": torch.zeros(6, 2)})
    factors = {
        "block.fc.lora_A.default.weight": torch.randn(2, 5),
        "block.fc.lora_B.default.weight": torch.randn(3, 2),
        "base_model.model.attn.lora_A.weight": torch.randn(2, 2),
        "base_model.model.attn.lora_B.weight": torch.randn(6, 2),
    }
    written(tmp_path, factors, r=2, lora_alpha=2)

    source = open_adapter(tmp_path, base, None)

    a, b, c, d = factors.values()
    assert torch.allclose(source.read("block.fc.weight"), (b @ a).double(), atol=1e-6)
    assert torch.allclose(source.read("attn.in_proj_weight"), (d @ c).double(), atol=1e-6)


def written(folder, tensors, **config):
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))


def test_a_16_bit_base_does_not_round_the_change(tmp_path):
    torch.manual_seed(0)
    base = StateDictSource({"fc.weight": torch.randn(8, 8).bfloat16()})
    factors = {"fc.lora_A.weight": 1e-3 * torch.randn(2, 8), "fc.lora_B.weight": torch.randn(8, 2)}
    written(tmp_path, factors, r=2, lora_alpha=4)

    source = open_adapter(tmp_path, base, None)

    wanted = 2.0 * factors["fc.lora_B.weight"].double() @ factors["fc.lora_A.weight"].double()
    change = source.read("fc.weight") - base.read("fc.weight").double()
    assert torch.allclose(change, wanted, rtol=1e-10, atol=1e-12)
    assert source.spec("fc.weight").dtype == torch.bfloat16
