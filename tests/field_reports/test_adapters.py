"""LoRA: what people report, and what they see here."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft_adapters import adapted, loaded
from safetensors.torch import load_file, save_file
from small_models import (
    added_up,
    clip_tower,
    expert,
    llama,
    run,
    saved,
    spec_of,
    tensors_in,
    vit_classifier,
)
from torch import Tensor

from merging.errors import CheckpointError
from merging.pipeline import Pipeline

Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
SUM = {"type": "task_arithmetic", "scale": 1.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(llama(), tmp_path_factory.mktemp("llama") / "base")


def adapter(
    folder: Path, name: str, seed: int = 0, **config: Any
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The entry of a spec, and what PEFT merges the adapter to."""
    settings = {"lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **config}
    return {"adapter": str(folder / name)}, adapted(llama(), folder / name, seed=seed, **settings)


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> bool:
    return all(torch.allclose(found[name].double(), wanted[name].double(), atol=tolerance) for name in found)


def test_a_rank_stabilised_adapter_is_as_strong_on_the_way_out_as_on_the_way_in(
    base: Path, tmp_path: Path
) -> None:
    one, folded = adapter(tmp_path, "one", use_rslora=True, lora_alpha=1)

    full = run(tmp_path / "full", spec_of(base, {"one": one}, SUM))
    again = run(tmp_path / "again", spec_of(base, {"one": one}, SUM, output={"form": "lora", "rank": 4}))

    assert close(tensors_in(full), folded, 1e-6)
    config = json.loads((again / "adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"]
    assert config["use_rslora"] is False
    assert close(loaded(llama(), again), folded, 1e-6)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, -1.0), (-1.0,)])
def test_sums_of_adapters_have_no_cross_terms_and_minus_one_negates(
    base: Path, tmp_path: Path, weights: tuple[float, ...]
) -> None:
    start, experts, oracle = tensors_in(base), {}, {name: t.double() for name, t in tensors_in(base).items()}
    for seed, weight in enumerate(weights):
        one, folded = adapter(tmp_path, str(seed), seed)
        experts[str(seed)] = {**one, "weight": weight}
        oracle = {
            name: t + weight * (folded[name].double() - start[name].double()) for name, t in oracle.items()
        }

    assert close(tensors_in(run(tmp_path / "out", spec_of(base, experts, SUM))), oracle)


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_bias": True, "target_modules": ["fc1"]}])
def test_variants_equal_pefts_own_merge(base: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    model = llama() if "use_dora" in config else clip_tower()
    saved(model, tmp_path / "base")
    folded = adapted(model, tmp_path / "one", **{"target_modules": ["q_proj"], **config})
    spec = spec_of(tmp_path / "base", {"one": {"adapter": str(tmp_path / "one")}}, SUM)

    assert close(tensors_in(run(tmp_path / "out", spec)), folded)


@pytest.mark.parametrize(
    ("field", "value"),
    [("target_parameters", ["mlp.weight"]), ("trainable_token_indices", [1]), ("init_lora_weights", "pissa")],
)
def test_a_variant_that_is_not_read_names_its_field(
    base: Path, tmp_path: Path, field: str, value: Any
) -> None:
    one, _ = adapter(tmp_path, "one")
    file = tmp_path / "one" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))

    with pytest.raises(CheckpointError, match=field):
        Pipeline.from_spec(spec_of(base, {"one": one})).validate()


def test_trained_heads_of_two_adapters_are_both_kept_bit_for_bit(tmp_path: Path) -> None:
    base = vit_classifier(3)
    base.base_model.save_pretrained(tmp_path / "base")
    start = base.base_model.state_dict()
    experts, backbones = {}, []
    for task, classes in (("three", 3), ("five", 5)):
        model = vit_classifier(classes, seed=classes)
        model.base_model.load_state_dict(start)
        saves = {"target_modules": ["q_proj", "query"], "modules_to_save": ["classifier"]}
        merged = adapted(model, tmp_path / task, seed=classes, lora_alpha=1, **saves)
        backbones.append(
            {name.removeprefix("vit."): t for name, t in merged.items() if name.startswith("vit.")}
        )
        experts[task] = {"adapter": str(tmp_path / task)}

    found = run(tmp_path / "out", spec_of(tmp_path / "base", experts))

    merged_backbone = hf.ViTModel.from_pretrained(found, add_pooling_layer=False).state_dict()
    assert close(merged_backbone, added_up(start, backbones, 0.3))
    for task, classes in (("three", 3), ("five", 5)):
        stored = load_file(tmp_path / task / "adapter_model.safetensors")
        kept = load_file(tmp_path / "out" / "heads" / task / "head.safetensors")
        assert kept["classifier.weight"].shape == (classes, 32)
        assert all(torch.equal(kept[name], stored[f"base_model.model.{name}"]) for name in kept)
        config = hf.AutoConfig.from_pretrained(tmp_path / "out" / "heads" / task)
        assert config.num_labels == classes
    heads = json.loads((found / "manifest.json").read_text())["notes"]["heads"]
    assert all(heads[task]["own"]["tensors"] == ["classifier.bias", "classifier.weight"] for task in experts)


@pytest.mark.parametrize(("part", "found"), [("model.layers", "0 of 8"), ("model.layers.0", "4 of 8")])
def test_an_adapter_that_matches_nothing_or_half_stops_with_both_sides(
    base: Path, tmp_path: Path, part: str, found: str
) -> None:
    one, _ = adapter(tmp_path, "one")
    file = tmp_path / "one" / "adapter_model.safetensors"
    tensors = load_file(file)
    other = part.replace("model.layers", "model.language_tower.layers")
    save_file({name.replace(part, other): tensor for name, tensor in tensors.items()}, file)

    with pytest.raises(CheckpointError) as caught:
        Pipeline.from_spec(spec_of(base, {"one": one})).run(tmp_path / "out")

    assert f"{found} adapter tensors match the base" in str(caught.value)
    assert "language_tower" in str(caught.value)
    assert "the base has: model.layers.0." in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_adapters_on_the_fused_attention_of_open_clip_equal_pefts_merge(tmp_path: Path) -> None:
    import open_clip
    import peft

    torch.manual_seed(0)
    vision = {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32, "mlp_ratio": 2.0}
    text = {"context_length": 16, "vocab_size": 99, "width": 32, "heads": 4, "layers": 2}
    model = open_clip.model.CLIP(embed_dim=32, vision_cfg=vision, text_cfg=text).eval()
    (tmp_path / "base").mkdir()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "base" / "model.safetensors")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["attn"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, config)
        wrapped.save_pretrained(tmp_path / "one")
        merged = wrapped.merge_and_unload().state_dict()
    spec = spec_of(tmp_path / "base", {"one": {"adapter": str(tmp_path / "one")}}, SUM)

    found = tensors_in(run(tmp_path / "out", {**spec, "allow": ["other_base"]}))

    assert close(found, merged)
    assert not torch.equal(
        found["transformer.resblocks.0.attn.in_proj_weight"],
        state["transformer.resblocks.0.attn.in_proj_weight"],
    )


def test_an_adapter_of_another_base_is_told_of_with_both_names_and_hashed(base: Path, tmp_path: Path) -> None:
    one, _ = adapter(tmp_path, "one")
    file = tmp_path / "one" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "org/other"}))

    merged = run(tmp_path / "out", spec_of(base, {"one": one}))

    warnings_ = json.loads((tmp_path / "out" / "report.json").read_text())["warnings"]
    assert any("org/other" in note and str(base) in note for note in warnings_)
    inputs = json.loads((merged / "manifest.json").read_text())["inputs"]
    assert inputs["base"]["files"]["model.safetensors"]["sha256"]
    assert inputs['expert "one"']["files"]["adapter_model.safetensors"]["sha256"]


@pytest.mark.parametrize("rule", ["tsv_m", "iso_c", "regmean"])
@pytest.mark.parametrize("form", ["adapter", "model"])
def test_kernels_of_convolutions_keep_their_shape(tmp_path: Path, rule: str, form: str) -> None:
    model = clip_tower()
    saved(model, tmp_path / "base")
    experts: dict[str, Any] = {}
    for seed in (1, 2):
        if form == "adapter":
            adapted(
                model,
                tmp_path / str(seed),
                seed=seed,
                lora_alpha=1,
                target_modules=["patch_embedding", "fc1"],
            )
            experts[str(seed)] = {"adapter": str(tmp_path / str(seed))}
        else:
            experts[str(seed)] = saved(expert(model, seed), tmp_path / str(seed))
    save_file({"pixel_values": torch.randn(6, 3, 32, 32)}, tmp_path / "data.safetensors")
    source = {"calibration": {"type": "tensors", "path": str(tmp_path / "data.safetensors")}}
    spec = spec_of(tmp_path / "base", experts, {"type": rule}, tasks=dict.fromkeys(experts, source))

    found = tensors_in(run(tmp_path / "out", spec))

    start = tensors_in(tmp_path / "base")
    name = "embeddings.patch_embedding.weight"
    assert found[name].shape == start[name].shape == (32, 3, 8, 8)
    assert not torch.equal(found[name], start[name])
