"""Every merge rule and every calibrator on every kind of backbone: runs, saves, reopens strictly, finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tiny_models import CASES, PICTURE, SIZE, TEXT, expert_of, made
from torch import nn

import merging
import merging.components
from merging.calibrators import BUILTIN as CALIBRATORS
from merging.pipeline import Pipeline
from merging.strategies import BUILTIN as STRATEGIES

BACKBONES = ("clip", "vit", "llama", "t5", "bert")
QUICK = {
    "wudi": {"steps": 3},
    "ada_merging": {"steps": 2},
    "surgery": {"iterations": 3},
    "prob_surgery": {"steps": 2},
}
NEED_ADAPTERS = {"knots", "core_space"}  # their matrix: tests/test_adapter_runs.py
RULES = [name for name in STRATEGIES if name not in {"checkpoint", *NEED_ADAPTERS}]
EXPERTS = ("one", "two")
CLASSES = 3


@pytest.fixture(scope="module", params=BACKBONES)
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A spec without method: base, two experts, examples and heads on disk."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    backbone, base, batches = made(request.param)
    base.save_pretrained(folder / "base")
    batch = {name: value.contiguous() for name, value in batches[0].items()}
    with torch.no_grad():
        features = backbone.features(base(**backbone.forward_kwargs(batch)), batch)
    labels = torch.arange(len(features)) % CLASSES
    generator = torch.Generator().manual_seed(0)
    spec: dict[str, Any] = {"base": str(folder / "base"), "experts": {}, "tasks": {}, "device": "cpu"}
    for seed, task in enumerate(EXPERTS, start=1):
        changed_by_noise(made(request.param)[1], seed).save_pretrained(folder / task)
        save_file(batch, folder / f"{task}.safetensors")
        save_file({**batch, "labels": labels}, folder / f"{task}-test.safetensors")
        head = torch.randn(CLASSES, features.shape[1], generator=generator)
        save_file({"weight": head}, folder / f"{task}-head.safetensors")
        spec["experts"][task] = str(folder / task)
        spec["tasks"][task] = {
            "calibration": {"type": "tensors", "path": str(folder / f"{task}.safetensors")},
            "test": {"type": "tensors", "path": str(folder / f"{task}-test.safetensors")},
            "head": {"type": "linear", "path": str(folder / f"{task}-head.safetensors")},
        }
    return spec


def changed_by_noise(model: nn.Module, seed: int) -> Any:
    """Parameter by parameter, so that tied ones stay tied."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return model


def reopened(folder: Path, architecture: str) -> None:
    model, loading = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def architecture(spec: dict[str, Any]) -> str:
    import json

    return str(json.loads((Path(spec["base"]) / "config.json").read_text())["architectures"][0])


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_on_every_backbone(suite: dict[str, Any], rule: str, tmp_path: Path) -> None:
    spec = {**suite, "merge": {"type": rule, **QUICK.get(rule, {})}, "allow": ["overlap"]}

    report = Pipeline.from_spec(spec).run(tmp_path / "out")

    reopened(tmp_path / "out" / "merged", architecture(suite))
    assert set(report.tasks) == set(EXPERTS)


@pytest.mark.parametrize("calibrator", CALIBRATORS)
def test_every_calibrator_on_every_backbone(suite: dict[str, Any], calibrator: str, tmp_path: Path) -> None:
    asked = {"type": calibrator, **QUICK.get(calibrator, {})}
    spec = {**suite, "merge": {"type": "average"}, "calibrate": asked, "allow": ["overlap"]}

    report = Pipeline.from_spec(spec).run(tmp_path / "out")

    reopened(tmp_path / "out" / "calibrated", architecture(suite))
    assert all(task.scores.calibrated is not None for task in report.tasks.values())


def test_the_matrix_names_backbones_that_exist() -> None:
    assert set(BACKBONES) <= set(CASES)


DATA_FREE = [name for name in RULES if "data" not in merging.components.strategies.get(name).needs]


@pytest.mark.parametrize("rule", DATA_FREE)
def test_every_rule_without_data_ends_on_a_whole_clip(rule: str) -> None:
    text = transformers.CLIPTextConfig(**SIZE, **TEXT).to_dict()
    vision = transformers.CLIPVisionConfig(**SIZE, **PICTURE).to_dict()
    torch.manual_seed(0)
    base = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    )
    experts = {task: expert_of(base, seed, noise=0.01) for seed, task in enumerate(EXPERTS, start=1)}

    merged = merging.merge(rule, base, experts, **QUICK.get(rule, {}))

    assert merged.keys() == base.state_dict().keys()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in merged.values() if tensor.is_floating_point())
    base.load_state_dict(merged, strict=True)
