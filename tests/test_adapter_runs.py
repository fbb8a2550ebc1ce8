"""Whole runs with adapters as experts: what users of LoRA see."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import adapted
from safetensors.torch import load_file, save_file
from tiny_models import GROUPED, PICTURE, SIZE, pixels
from torch import Tensor, nn

from merging.comparison import compare_checkpoints
from merging.errors import CheckpointError
from merging.pipeline import Pipeline

TASKS = ("digits", "letters")


class Workshop:
    """A base, an adapter and the folded model for each task, and batches to calibrate on."""

    def __init__(self, folder: Path, model: nn.Module, configs: dict[str, dict[str, Any]]) -> None:
        self.folder, self.model = folder, model
        model.save_pretrained(folder / "base")
        self.folded = {}
        for seed, (task, config) in enumerate(configs.items()):
            self.folded[task] = adapted(model, folder / task, seed=seed, **config)
            save_file(pixels(12, seed=seed), folder / f"{task}.safetensors")

    def spec(self, merge: dict[str, Any], **changes: Any) -> dict[str, Any]:
        experts = {task: {"adapter": str(self.folder / task)} for task in self.folded}
        spec = {"base": str(self.folder / "base"), "experts": experts, "merge": merge, "device": "cpu"}
        return {**spec, **changes}

    def run(self, out: Path, merge: dict[str, Any], **changes: Any) -> dict[str, Tensor]:
        Pipeline.from_spec(self.spec(merge, **changes)).run(out)
        return load_file(out / "merged" / "model.safetensors")

    def data(self) -> dict[str, Any]:
        return {
            task: {"calibration": {"type": "tensors", "path": str(self.folder / f"{task}.safetensors")}}
            for task in self.folded
        }


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """CLIP's vision tower with adapters on projections and on the kernel of its patches."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    model = CLIPVisionModel(CLIPVisionConfig(**SIZE, **PICTURE)).eval()
    targets = ["q_proj", "fc1", "patch_embedding"]
    configs = {
        "digits": {"r": 2, "lora_alpha": 1, "target_modules": targets},
        "letters": {"r": 3, "lora_alpha": 2, "target_modules": targets, "use_rslora": True},
    }
    return Workshop(tmp_path_factory.mktemp("clip"), model, configs)


@pytest.fixture(scope="module")
def folded(clip: Workshop) -> dict[str, str]:
    """The experts of `clip` as full checkpoints."""
    from transformers import CLIPVisionModel

    for task, tensors in clip.folded.items():
        model = CLIPVisionModel(clip.model.config)
        model.load_state_dict(tensors)
        model.save_pretrained(clip.folder / f"{task}-folded")
    return {task: str(clip.folder / f"{task}-folded") for task in clip.folded}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> bool:
    return all(torch.allclose(found[name], wanted[name], rtol=0, atol=tolerance) for name in wanted)


def test_a_rank_stabilised_adapter_of_weight_one_comes_out_as_peft_merges_it(
    clip: Workshop, tmp_path: Path
) -> None:
    alone = {"letters": {"adapter": str(clip.folder / "letters")}}

    merged = clip.run(tmp_path / "out", {"type": "task_arithmetic", "scale": 1.0}, experts=alone)

    assert close(merged, clip.folded["letters"], 1e-6)


@pytest.mark.parametrize("weights", [(1, 1), (1, -1), (-1,)])
def test_adapters_add_up_as_their_products_without_cross_terms(
    clip: Workshop, tmp_path: Path, weights: tuple[int, ...]
) -> None:
    experts = {
        task: {"adapter": str(clip.folder / task), "weight": weight}
        for task, weight in zip(TASKS, weights, strict=False)
    }

    merged = clip.run(tmp_path / "out", {"type": "task_arithmetic", "scale": 1.0}, experts=experts)

    base = clip.model.state_dict()
    wanted = {
        name: base[name]
        + sum(ref["weight"] * (clip.folded[task][name] - base[name]) for task, ref in experts.items())
        for name in base
    }
    assert close(merged, wanted)


DATA_FREE = [
    "average",
    "task_arithmetic",
    "ties",
    "dare",
    "dare_ties",
    "della",
    "breadcrumbs",
    "sce",
    "slerp",
    "karcher",
    "model_stock",
]
LAYERWISE = ["regmean", "regmean_plus_plus", "chain_of_merges", "lot"]
ON_MATRICES = ["tsv_m", "iso_c", "iso_cts", "wudi"]


@pytest.mark.parametrize("rule", [*DATA_FREE, *ON_MATRICES, *LAYERWISE])
def test_adapters_merge_as_the_checkpoints_into_which_peft_folds_them(
    clip: Workshop, folded: dict[str, str], tmp_path: Path, rule: str
) -> None:
    tasks = clip.data() if rule in LAYERWISE else {}

    merged = clip.run(tmp_path / "adapters", {"type": rule}, tasks=tasks)

    wanted = clip.run(tmp_path / "folded", {"type": rule}, tasks=tasks, experts=folded)
    differing = sum(int((abs(merged[name] - wanted[name]) > 1e-4).sum()) for name in wanted)
    assert differing <= (10 if rule in ("ties", "dare_ties", "sce", "breadcrumbs", "della") else 0)


@pytest.mark.parametrize("rule", ["tsv_m", "iso_c", "regmean"])
@pytest.mark.parametrize("kernels", [False, True])
def test_a_kernel_with_an_adapter_keeps_its_shape(
    clip: Workshop, tmp_path: Path, rule: str, kernels: bool
) -> None:
    settings = {"kernels": True} if kernels and rule != "regmean" else {}
    tasks = clip.data() if rule == "regmean" else {}

    merged = clip.run(tmp_path / "out", {"type": rule, **settings}, tasks=tasks)

    name = next(name for name in merged if name.endswith("patch_embedding.weight"))
    assert merged[name].shape == (32, 3, 8, 8)
    base = clip.model.state_dict()[name]
    assert not torch.equal(merged[name], base)
    if not settings:
        mean = sum(tensors[name] for tensors in clip.folded.values()) / 2
        assert torch.allclose(merged[name], mean, atol=1e-5)


@pytest.mark.parametrize("rule", ["knots", "core_space"])
def test_rules_for_adapters_run_from_the_spec(clip: Workshop, tmp_path: Path, rule: str) -> None:
    inner = {"type": "task_arithmetic", "scale": 1.0}

    merged = clip.run(tmp_path / "out", {"type": rule, "scale": 0.5, "inner": inner})

    wanted = clip.run(tmp_path / "plain", {"type": "task_arithmetic", "scale": 0.5})
    assert close(merged, wanted)
    manifest = json.loads((tmp_path / "out" / "merged" / "manifest.json").read_text())
    assert manifest["spec"]["merge"]["inner"]["type"] == "task_arithmetic"


def test_adapters_are_calibrated_as_full_experts_are(
    clip: Workshop, folded: dict[str, str], tmp_path: Path
) -> None:
    merge, calibrate = {"type": "average"}, {"type": "featcal"}

    clip.run(tmp_path / "out", merge, calibrate=calibrate, tasks=clip.data())
    clip.run(tmp_path / "folded", merge, calibrate=calibrate, tasks=clip.data(), experts=folded)

    found, wanted = (
        load_file(tmp_path / name / "calibrated" / "model.safetensors") for name in ("out", "folded")
    )
    assert close(found, wanted, 1e-4)


def test_plan_validate_and_compare_take_adapters(clip: Workshop) -> None:
    pipeline = Pipeline.from_spec(clip.spec({"type": "knots"}))

    plan = pipeline.plan()
    found = compare_checkpoints(str(clip.folder / "base"), str(clip.folder / "digits"))

    assert plan.experts["digits"].path == str(clip.folder / "digits")
    assert plan.steps[0].needs == ("base", "low rank")
    assert pipeline.validate() == []
    assert not found.misfits
    base = clip.model.state_dict()
    change = sum(float((clip.folded["digits"][name] - base[name]).square().sum()) for name in base) ** 0.5
    assert found.total.difference == pytest.approx(change, rel=1e-4)


def test_an_adapter_of_the_hub_is_found_in_an_offline_cache(
    clip: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    commit, repo = "0123456789abcdef0123456789abcdef01234567", tmp_path / "hub" / "models--someone--digits"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for number, name in enumerate(("adapter_config.json", "adapter_model.safetensors")):
        (repo / "blobs" / f"{number:040x}").write_bytes((clip.folder / "digits" / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/{number:040x}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    merged = clip.run(
        tmp_path / "out",
        {"type": "task_arithmetic", "scale": 1.0},
        experts={"digits": {"adapter": "someone/digits"}},
    )

    assert close(merged, clip.folded["digits"])
    manifest = json.loads((tmp_path / "out" / "merged" / "manifest.json").read_text())
    assert manifest["inputs"]['expert "digits"']["revision"] == commit


def test_an_adapter_of_another_base_is_told_of_and_all_inputs_are_hashed(
    clip: Workshop, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(clip.folder / "digits", tmp_path / "digits")
    file = tmp_path / "digits" / "adapter_config.json"
    config = {**json.loads(file.read_text()), "base_model_name_or_path": "openai/another-clip"}
    file.write_text(json.dumps(config))

    report = Pipeline.from_spec(
        clip.spec({"type": "average"}, experts={"digits": {"adapter": str(tmp_path / "digits")}})
    ).run(tmp_path / "out")

    told = next(warning for warning in report.warnings if "openai/another-clip" in warning)
    assert str(clip.folder / "base") in told
    inputs = json.loads((tmp_path / "out" / "merged" / "manifest.json").read_text())["inputs"]
    assert set(inputs['expert "digits"']["files"]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert all(entry["sha256"] for role in inputs.values() for entry in role["files"].values())


def test_every_adapter_that_does_not_fit_is_told_of_before_anything_is_written(
    clip: Workshop, tmp_path: Path
) -> None:
    import shutil

    for task, part in (("digits", "q_proj"), ("letters", "")):
        shutil.copytree(clip.folder / task, tmp_path / task)
        file = tmp_path / task / "adapter_model.safetensors"
        tensors = load_file(file)
        renamed = {name.replace(part, f"x.{part}") if part else f"x.{name}": t for name, t in tensors.items()}
        save_file(renamed, file)
    experts = {task: {"adapter": str(tmp_path / task)} for task in TASKS}

    with pytest.raises(CheckpointError) as caught:
        Pipeline.from_spec(clip.spec({"type": "average"}, experts=experts)).run(tmp_path / "out")

    assert 'expert "digits": 8 of 14 adapter tensors match the base' in str(caught.value)
    assert 'expert "letters": 0 of 14 adapter tensors match the base' in str(caught.value)
    assert not (tmp_path / "out").exists()


def classifiers(folder: Path, kind: str) -> tuple[nn.Module, dict[str, dict[str, Tensor]]]:
    """A base of language or vision, and what PEFT merges two classifiers of 3 and 5 classes on it to."""
    import transformers as hf

    torch.manual_seed(0)
    if kind == "llama":
        base = hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)).eval()
        make, targets, head = hf.LlamaForSequenceClassification, ["q_proj", "v_proj"], ["score"]
    else:
        base = hf.ViTForImageClassification(hf.ViTConfig(**SIZE, **PICTURE, num_labels=3)).eval()
        make, targets, head = hf.ViTForImageClassification, ["q_proj", "fc1"], ["classifier"]
    base.save_pretrained(folder / "base")
    merged = {}
    for seed, (task, classes) in enumerate({"three": 3, "five": 5}.items()):
        torch.manual_seed(10 + seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = make.from_pretrained(
                folder / "base", num_labels=classes, ignore_mismatched_sizes=True
            ).eval()
        config = {"target_modules": targets, "modules_to_save": head, "r": 2, "lora_alpha": 1}
        merged[task] = adapted(model, folder / task, seed=seed, **config)
    return base, merged


@pytest.mark.parametrize("kind", ["llama", "vit"])
def test_heads_of_three_and_five_classes_are_kept_bit_for_bit_and_the_backbone_is_merged(
    tmp_path: Path, kind: str
) -> None:
    base, experts = classifiers(tmp_path, kind)
    adapters = {task: {"adapter": str(tmp_path / task)} for task in experts}
    spec = {
        "base": str(tmp_path / "base"),
        "experts": adapters,
        "merge": {"type": "average"},
        "device": "cpu",
    }

    Pipeline.from_spec(spec).run(tmp_path / "out")

    head = "score" if kind == "llama" else "classifier"
    for task, classes in {"three": 3, "five": 5}.items():
        kept = load_file(tmp_path / "out" / "heads" / f"{task}.safetensors")
        assert kept["weight"].shape == (classes, 32)
        for part, tensor in kept.items():
            assert torch.equal(tensor, experts[task][f"{head}.{part}"])
    manifest = json.loads((tmp_path / "out" / "merged" / "manifest.json").read_text())
    assert manifest["notes"]["heads"]["five"]["file"] == "heads/five.safetensors"
    assert manifest["notes"]["heads"]["five"]["weight"] == [5, 32]
    reloaded = type(base).from_pretrained(tmp_path / "out" / "merged").state_dict()
    for name, tensor in base.state_dict().items():
        if name in experts["three"] and head not in name:
            wanted = (experts["three"][name] + experts["five"][name]) / 2
            assert torch.allclose(reloaded[name], wanted, atol=1e-6), name
        else:
            assert torch.equal(reloaded[name], tensor), name


def test_an_adapter_that_does_more_than_lora_names_its_field(clip: Workshop, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(clip.folder / "digits", tmp_path / "digits")
    file = tmp_path / "digits" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "target_parameters": ["mlp.fc1.weight"]}))
    experts = {"digits": {"adapter": str(tmp_path / "digits")}}

    with pytest.raises(CheckpointError, match=r"target_parameters: adapts parameters") as caught:
        Pipeline.from_spec(clip.spec({"type": "average"}, experts=experts)).validate()

    assert "merge_and_unload" in str(caught.value)
