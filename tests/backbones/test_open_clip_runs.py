"""Whole runs on open_clip checkpoints: what is solved, what is not and why; open_clip opens the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip_models import built, features, saved, texts
from safetensors.torch import load_file, save_file
from tiny_models import expert_of, pixels

from merging.errors import CheckpointError
from merging.pipeline import Pipeline
from merging.report.report import Report

TASKS = ("digits", "letters")
IMAGES, IDS = pixels(4, seed=9)["pixel_values"], texts(4, seed=9)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base, two experts, and examples of images, of texts, and of both."""
    folder = tmp_path_factory.mktemp("open_clip")
    base = built()
    saved(folder / "base", base.state_dict())
    for seed, task in enumerate(TASKS, start=1):
        saved(folder / task, expert_of(base, seed))
        images, ids = pixels(24, seed=seed)["pixel_values"], texts(24, seed=seed)
        save_file({"pixel_values": images}, folder / f"{task}-image.safetensors")
        save_file({"input_ids": ids}, folder / f"{task}-text.safetensors")
        save_file({"pixel_values": images, "input_ids": ids}, folder / f"{task}-both.safetensors")
        save_file({"weight": torch.randn(3, 16)}, folder / f"{task}-head.safetensors")
    return folder


def spec_of(workshop: Path, data: str = "image", **changes: Any) -> dict[str, Any]:
    tasks = {
        task: {"calibration": {"type": "tensors", "path": str(workshop / f"{task}-{data}.safetensors")}}
        for task in TASKS
    }
    experts = {task: str(workshop / task) for task in TASKS}
    base = {"base": str(workshop / "base"), "experts": experts, "tasks": tasks, "device": "cpu"}
    return {**base, "merge": {"type": "average"}, **changes}


def run(spec: dict[str, Any], out: Path) -> Report:
    return Pipeline.from_spec(spec).run(out)


def reopened(folder: Path) -> open_clip.CLIP:
    """By open_clip's own call, which loads strictly."""
    return open_clip.create_model(f"local-dir:{folder}").eval()


METHODS = {
    "regmean": {"merge": {"type": "regmean"}},
    "chain_of_merges": {"merge": {"type": "chain_of_merges"}},
    "featcal": {"calibrate": {"type": "featcal"}},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_wise_method_solves_both_towers(workshop: Path, tmp_path: Path, method: str) -> None:
    report = run(spec_of(workshop, "both", **METHODS[method]), tmp_path / "out")

    states = {name: fate.state for name, fate in report.parameters.items()}
    solved = [name for name, state in states.items() if state == "solved"]
    fused = [name for name in states if name.endswith("in_proj_weight")]
    assert len(fused) == 4
    assert set(fused) <= set(solved)
    assert states["visual.transformer.resblocks.0.attn.out_proj.weight"] == "solved"
    assert states["visual.conv1.weight"] == states["logit_scale"] == "merged"
    assert report.parameters["text_projection"].reason == "outside the blocks"
    model = reopened(Path(report.checkpoint))
    assert all(bool(torch.isfinite(each).all()) for each in features(model, IMAGES, IDS))
    assert not torch.equal(model.visual.transformer.resblocks[0].attn.in_proj_weight, torch.zeros(96, 32))


@pytest.mark.parametrize("method", METHODS)
def test_a_tower_without_data_stays_merged_and_is_listed(workshop: Path, tmp_path: Path, method: str) -> None:
    report = run(spec_of(workshop, "image", **METHODS[method]), tmp_path / "out")

    fates = report.parameters
    weight = "transformer.resblocks.0.attn.in_proj_weight"
    assert fates[f"visual.{weight}"].state == "solved"
    assert fates[weight].state == "merged"
    assert "n = 0" in fates[weight].reason
    merged = load_file(Path(report.checkpoint) / "open_clip_model.safetensors")
    experts = [load_file(workshop / task / "open_clip_model.safetensors") for task in TASKS]
    mean = sum(expert[weight] for expert in experts) / 2
    torch.testing.assert_close(merged[weight], mean, rtol=0, atol=1e-6)


def test_each_task_may_bring_its_own_tower(workshop: Path, tmp_path: Path) -> None:
    spec = spec_of(workshop, calibrate={"type": "featcal"})
    spec["tasks"]["letters"]["calibration"]["path"] = str(workshop / "letters-text.safetensors")

    report = run(spec, tmp_path / "out")

    for weight in (
        "visual.transformer.resblocks.1.mlp.c_fc.weight",
        "transformer.resblocks.1.mlp.c_fc.weight",
    ):
        assert report.parameters[weight].state == "solved"
    drift = report.drift
    assert {row.block.split(".")[0] for row in drift.tasks["digits"]} == {"visual"}
    assert {row.block.split(".")[0] for row in drift.tasks["letters"]} == {"transformer"}
    assert len(drift.mean) == 4


def test_the_result_carries_its_activation_and_gives_the_same_features(
    workshop: Path, tmp_path: Path
) -> None:
    report = run(spec_of(workshop, "both", calibrate={"type": "featcal"}), tmp_path / "out")

    folder = Path(report.checkpoint)
    settings = json.loads((folder / "open_clip_config.json").read_text())
    assert settings["model_cfg"]["quick_gelu"] is True
    assert [path.name for path in folder.glob("*.safetensors")] == ["open_clip_model.safetensors"]
    in_memory = built()
    in_memory.load_state_dict(load_file(folder / "open_clip_model.safetensors"))
    for found, expected in zip(
        features(reopened(folder), IMAGES, IDS), features(in_memory, IMAGES, IDS), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert 'create_model("local-dir:' in (folder / "README.md").read_text()


def test_an_expert_of_another_activation_is_found_before_the_work(workshop: Path, tmp_path: Path) -> None:
    saved(tmp_path / "gelu", built().state_dict(), quick_gelu=False)
    spec = spec_of(workshop)
    spec["experts"]["letters"] = str(tmp_path / "gelu")

    with pytest.raises(CheckpointError, match="quick_gelu False, the base has True"):
        Pipeline.from_spec(spec).validate()


def test_one_expert_comes_back(workshop: Path, tmp_path: Path) -> None:
    spec = spec_of(workshop, "both", merge={"type": "regmean", "shrink": 1.0})
    spec["experts"].pop("letters")
    spec["tasks"].pop("letters")

    report = run(spec, tmp_path / "out")

    found = load_file(Path(report.checkpoint) / "open_clip_model.safetensors")
    for name, tensor in load_file(workshop / "digits" / "open_clip_model.safetensors").items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-4, msg=name)


def test_pickled_weights_are_read_under_the_same_rules(workshop: Path, tmp_path: Path) -> None:
    tensors = load_file(workshop / "letters" / "open_clip_model.safetensors")
    saved(tmp_path / "letters", tensors, pickled=True)
    spec = spec_of(workshop, experts={"letters": str(tmp_path / "letters")}, tasks={})

    report = run(spec, tmp_path / "out")

    found = load_file(Path(report.checkpoint) / "open_clip_model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_images_are_prepared_as_open_clip_does(workshop: Path, tmp_path: Path) -> None:
    from PIL import Image

    noise = torch.randint(0, 255, (48, 40, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    picture = Image.fromarray(noise.numpy())
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        picture.save(tmp_path / "images" / name / "one.png")
    spec = spec_of(workshop, experts={"digits": str(workshop / "digits")}, tasks={})
    spec["tasks"] = {"digits": {"calibration": {"type": "images", "path": str(tmp_path / "images")}}}

    task = Pipeline.from_spec(spec).tasks()["digits"]

    _, _, transform = open_clip.create_model_and_transforms(f"local-dir:{workshop / 'base'}")
    assert task.calibration is not None
    assert torch.equal(task.calibration.batches()[0]["pixel_values"][0], transform(picture))


@pytest.mark.parametrize(
    "method",
    [
        {"merge": {"type": "fisher"}},
        {"merge": {"type": "ada_merging", "steps": 2}},
        {"calibrate": {"type": "surgery", "iterations": 2}},
    ],
)
def test_methods_that_run_whole_models_know_its_names(
    workshop: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    spec = spec_of(workshop, **method)
    for task in TASKS:
        head = {"type": "linear", "path": str(workshop / f"{task}-head.safetensors")}
        spec["tasks"][task]["head"] = head

    report = run(spec, tmp_path / "out")

    fused = "visual.transformer.resblocks.0.attn.in_proj_weight"
    found = load_file(Path(report.checkpoint) / "open_clip_model.safetensors")[fused]
    assert bool(torch.isfinite(found).all())
    assert not torch.equal(found, load_file(workshop / "base" / "open_clip_model.safetensors")[fused])
    reopened(Path(report.checkpoint))


@pytest.mark.parametrize(
    ("split", "matched"), [(False, "*attn.in_proj_weight"), (True, "*attn.q_proj.weight")]
)
def test_layers_go_by_the_names_that_the_rule_sees(
    workshop: Path, tmp_path: Path, split: bool, matched: str
) -> None:
    merge = {"type": "tsv_m", "layers": [{"match": matched, "leave_out": True}]}
    backbone = {"type": "open_clip", "split_attention": split}

    report = run(spec_of(workshop, merge=merge, backbone=backbone, tasks={}), tmp_path / "out")

    fused = "visual.transformer.resblocks.0.attn.in_proj_weight"
    found = load_file(Path(report.checkpoint) / "open_clip_model.safetensors")[fused]
    base = load_file(workshop / "base" / "open_clip_model.safetensors")[fused]
    same = (found == base).all(dim=1)
    assert same.tolist() == ([True] * 32 + [False] * 64 if split else [True] * 96)
    assert report.parameters[fused].state == ("merged" if split else "copied")


def test_an_adapter_on_fused_attention_equals_pefts_own_merge(workshop: Path, tmp_path: Path) -> None:
    import peft

    model = built()
    model.load_state_dict(load_file(workshop / "base" / "open_clip_model.safetensors"))
    torch.manual_seed(3)
    asked = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["attn"])
    adapted = peft.get_peft_model(model, asked)
    adapted.save_pretrained(tmp_path / "adapter")
    spec = spec_of(workshop, experts={"one": {"adapter": str(tmp_path / "adapter")}}, tasks={})

    report = run({**spec, "merge": {"type": "task_arithmetic", "scale": 1.0}}, tmp_path / "out")

    found = load_file(Path(report.checkpoint) / "open_clip_model.safetensors")
    for name, tensor in adapted.merge_and_unload().state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=name)


def test_a_tower_pickled_as_a_module_is_not_loaded(workshop: Path, tmp_path: Path) -> None:
    torch.save(built().visual, tmp_path / "expert.pt")

    with pytest.raises(CheckpointError, match=r"expert\.pt holds code and not only tensors"):
        Pipeline.from_spec(
            spec_of(workshop, experts={"one": str(tmp_path / "expert.pt")}, tasks={})
        ).validate()


def test_the_plan_tells_what_is_solved_and_what_no_example_reaches(workshop: Path, tmp_path: Path) -> None:
    pipeline = Pipeline.from_spec(spec_of(workshop, "image", calibrate={"type": "featcal"}))

    step = pipeline.plan().steps[1]
    report = pipeline.run(tmp_path / "out")

    assert step.unreached == ("transformer.resblocks",)
    assert step.solved == sum(fate.state == "solved" for fate in report.parameters.values()) > 0
