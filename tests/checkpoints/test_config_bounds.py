"""Numbers of a config that the weights cannot bear out: told at once, before any such thing is made."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from merging.architecture import transformers_config
from merging.checkpoints.config_bounds import refuse_unbounded
from merging.errors import CheckpointError


def checkpoint(folder: Path, pickled: bool = False, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {f"layer.{number}.weight": torch.zeros(4, 8) for number in range(3)}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


HUGE = [
    {"num_hidden_layers": 10**9},
    {"hidden_size": 10**12},
    {"n_layer": 10**7},
    {"intermediate_size": 10**10},
    {"vocab_size": 10**11},
    {"num_attention_heads": 10**9},
    {"max_position_embeddings": 10**12},
    {"n_positions": 10**6},
    {"num_labels": 10**8},
    {"num_local_experts": 10**8},
    {"image_size": 10**6},
    {"image_size": 40000, "patch_size": 1},
    {"text_config": {"num_hidden_layers": 10**30}},
    {"depths": [2, 10**9]},
    {"hidden_sizes": [64, 10**12]},
]


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickled"])
@pytest.mark.parametrize("config", HUGE, ids=lambda config: "-".join(config))
def test_a_number_that_no_weights_bear_out(tmp_path: Path, config: dict[str, Any], pickled: bool) -> None:
    folder = checkpoint(tmp_path / "base", pickled, **config)
    began = time.monotonic()

    with pytest.raises(CheckpointError) as caught:
        transformers_config(folder)

    said = str(caught.value)
    assert f"{folder / 'config.json'} asks for a model far larger than its weights" in said
    assert next(iter(config)) in said
    assert "found" in said
    assert "expected at most" in said
    assert "Get config and weights from one place" in said
    assert time.monotonic() - began < 20  # a minute and no end before


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 32, "hidden_size": 8192, "vocab_size": 262144 // 4, "rope_theta": 10**9},
        {"max_position_embeddings": 10485760, "max_window_layers": 10**6, "eos_token_id": 10**6},
        {"image_size": 1024, "patch_size": 16, "num_labels": 21843, "layer_norm_eps": 1e-5, "seed": 10**18},
        {"num_hidden_layers": "12", "hidden_size": None, "use_cache": True, "layer_types": ["full"] * 3},
    ],
)
def test_numbers_that_models_have(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = checkpoint(tmp_path / "base", **config)

    refuse_unbounded(folder / "config.json", config, folder)


def test_what_the_weights_bear_out_is_no_matter_how_large(tmp_path: Path) -> None:
    tensors = {"embedding": torch.zeros(1_500_000, 1, dtype=torch.uint8)}
    tensors |= {f"layers.{number}.weight": torch.zeros(1) for number in range(2000)}
    save_file(tensors, tmp_path / "model.safetensors")

    refuse_unbounded(tmp_path / "config.json", {"vocab_size": 1_500_000, "num_layers": 2000}, tmp_path)


def test_open_clips_own_config_is_read_likewise(tmp_path: Path) -> None:
    from merging.architecture import select_backbone
    from merging.spec import Component
    from merging.spec.component import AUTO, AutoSettings

    folder = checkpoint(tmp_path / "base")
    (folder / "config.json").unlink()
    model = {"embed_dim": 8, "vision_cfg": {"layers": 10**9, "width": 10**12}, "text_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": model}))

    with pytest.raises(
        CheckpointError, match=r"open_clip_config\.json asks for a model far larger"
    ) as caught:
        select_backbone(folder, Component(type=AUTO, settings=AutoSettings()))

    assert "model_cfg.vision_cfg.layers" in str(caught.value)
    assert "model_cfg.vision_cfg.width" in str(caught.value)
