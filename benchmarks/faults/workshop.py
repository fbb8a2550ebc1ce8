"""Tiny models of three backbones with experts, examples and heads, drawn from seeds, to try faults on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TASKS = ("digits", "letters")
BACKBONES = ("clip_vision", "llama", "t5")
MODULES: Mapping[str, list[str]] = {
    "clip_vision": ["q_proj", "fc1"],
    "llama": ["q_proj", "up_proj"],
    "t5": ["q", "wo"],
}
ENVIRONMENT = (  # what `settle` sets
    *("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"),
    *("MERGING_CACHE", "TMPDIR"),
)
_SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_VOCABULARY = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_EXAMPLES, _LENGTH, _CLASSES = 8, 7, 5


def settle(folder: Path) -> None:
    """Before torch is imported: one thread, no network, and a cache of its own in `folder`."""
    os.environ.update(
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        MERGING_CACHE=str(folder / "cache"),
        TMPDIR=str(folder / "tmp"),
    )
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    import tempfile

    tempfile.tempdir = None  # asked anew
    import torch

    torch.set_num_threads(1)  # no thread is lost in a fork


def models(folder: Path, backbone: str, *, adapter: bool = False) -> None:
    """`folder/base`, a folder for each task, its examples, a head where pictures are classified, and
    `folder/adapter` if asked for (which needs peft)."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    base = _model(backbone)
    base.save_pretrained(folder / "base")
    for seed, task in enumerate(TASKS, start=1):
        generator = torch.Generator().manual_seed(seed)
        expert = _model(backbone)
        expert.load_state_dict(
            {
                name: one + 0.05 * torch.randn(one.shape, generator=generator)
                for name, one in base.state_dict().items()
            },
            strict=True,
        )
        expert.save_pretrained(folder / task)
        inputs = _inputs(backbone, generator)
        save_file(inputs, folder / f"{task}.safetensors")
        if backbone == "clip_vision":
            labels = torch.randint(0, _CLASSES, (_EXAMPLES,), generator=generator)
            test = _inputs(backbone, generator)
            save_file({**test, "labels": labels}, folder / f"{task}-test.safetensors")
            weight = torch.randn(_CLASSES, _SIZE["hidden_size"], generator=generator)
            save_file({"weight": weight}, folder / f"{task}-head.safetensors")
    if adapter:
        _adapter(base, folder / "adapter", MODULES[backbone])


def spec(folder: Path, backbone: str, **keys: Any) -> dict[str, Any]:
    """Merging, calibrating, and where there is a head, evaluating; `keys` replace whole keys of the spec."""
    tasks: dict[str, Any] = {}
    for task in TASKS:
        data = {"type": "tensors", "path": str(folder / f"{task}.safetensors"), "batch_size": 5}
        tasks[task] = {"calibration": data}
        if backbone == "clip_vision":
            tasks[task]["test"] = {"type": "tensors", "path": str(folder / f"{task}-test.safetensors")}
            tasks[task]["head"] = {"type": "linear", "path": str(folder / f"{task}-head.safetensors")}
    return {
        "base": str(folder / "base"),
        "experts": {task: str(folder / task) for task in TASKS},
        "merge": {"type": "task_arithmetic", "scale": 0.4},
        "calibrate": {"type": "featcal", "norms": True},
        "tasks": tasks,
        "output": {"shard_size": "40KB" if backbone == "llama" else "5GB"},
        "device": "cpu",
        **keys,
    }


def written(path: Path, value: Any) -> Path:
    """The value as JSON in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
    return path


def _model(backbone: str) -> Any:
    import transformers as hf

    if backbone == "clip_vision":
        return hf.CLIPVisionModel(hf.CLIPVisionConfig(**_SIZE, image_size=32, patch_size=8)).eval()
    if backbone == "llama":
        config = hf.LlamaConfig(**_SIZE, **_VOCABULARY, num_key_value_heads=2, head_dim=8)
        return hf.LlamaForCausalLM(config).eval()
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = hf.T5Config(**sizes, vocab_size=64, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(config).eval()


def _inputs(backbone: str, generator: Any) -> dict[str, Any]:
    import torch

    if backbone == "clip_vision":
        return {"pixel_values": torch.randn(_EXAMPLES, 3, 32, 32, generator=generator)}
    ids = torch.randint(3, 60, (_EXAMPLES, _LENGTH), generator=generator)
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if backbone == "t5":
        found["decoder_input_ids"] = torch.randint(3, 60, (_EXAMPLES, 4), generator=generator)
    return found


def _adapter(base: Any, folder: Path, modules: list[str]) -> None:
    """A LoRA as PEFT writes it, without PEFT: two small factors a module."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(9)
    tensors = {}
    for name, weight in base.state_dict().items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.split(".")[-1] in modules:
            outputs, inputs = weight.shape
            place = f"base_model.model.{module}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(4, inputs, generator=generator)
            tensors[f"{place}.lora_B.weight"] = 0.05 * torch.randn(outputs, 4, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "base",
        "r": 4,
        "lora_alpha": 6,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": modules,
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
        "task_type": None,
        "inference_mode": True,
    }
    written(folder / "adapter_config.json", config)
