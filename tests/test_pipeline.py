"""A whole run on real small checkpoints: what it leaves, what it does not do again, and what a kill cannot
break."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import PICTURE, SIZE, expert_of, pixels
from torch import Tensor

import merging
from merging.errors import CheckpointError, MergingError, OutputError, RuleError, SpecError
from merging.pipeline import Pipeline
from merging.report.report import Report

TASKS = ("digits", "letters", "signs")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base, three experts, data and heads; labels are what each expert says, so that its own accuracy is
    1."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    folder = tmp_path_factory.mktemp("workshop")
    torch.manual_seed(0)
    base = CLIPVisionModel(CLIPVisionConfig(**SIZE, **PICTURE)).eval()
    base.save_pretrained(folder / "base")
    (folder / "base" / "preprocessor_config.json").write_text(
        '{"image_processor_type": "CLIPImageProcessor"}'
    )
    for seed, task in enumerate(TASKS, start=1):
        expert = CLIPVisionModel(base.config).eval()
        expert.load_state_dict(expert_of(base, seed, noise=0.05))
        expert.save_pretrained(folder / task)
        images = pixels(60, seed=100 + seed)
        weight = torch.randn(5, 32, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            features = expert(**images).pooler_output
        bias = -(features @ weight.T).mean(0)
        labels = (features @ weight.T + bias).argmax(1)
        save_file(pixels(40, seed=seed), folder / f"{task}-calibration.safetensors")
        save_file({**images, "labels": labels}, folder / f"{task}-test.safetensors")
        save_file({"weight": weight, "bias": bias}, folder / f"{task}-head.safetensors")
    return folder


def spec_of(workshop: Path, **changes: Any) -> dict[str, Any]:
    tasks = {
        task: {
            "calibration": {"type": "tensors", "path": str(workshop / f"{task}-calibration.safetensors")},
            "test": {"type": "tensors", "path": str(workshop / f"{task}-test.safetensors")},
            "head": {"type": "linear", "path": str(workshop / f"{task}-head.safetensors")},
        }
        for task in TASKS
    }
    spec = {
        "base": str(workshop / "base"),
        "experts": {task: str(workshop / task) for task in TASKS},
        "merge": {"type": "average"},
        "calibrate": {"type": "featcal"},
        "tasks": tasks,
        "device": "cpu",
    }
    return {**spec, **changes}


def run(workshop: Path, out: Path, **changes: Any) -> Report:
    return Pipeline.from_spec(spec_of(workshop, **changes)).run(out)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_run_leaves_what_the_contract_says(workshop: Path, tmp_path: Path) -> None:
    from transformers import CLIPVisionModel

    report = run(workshop, tmp_path / "out")

    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        ".merging",
        "calibrated",
        "heads",
        "merged",
        "report.json",
    ]
    assert report == Report.read(out / "report.json")
    assert report.checkpoint == str(out / "calibrated")
    assert sorted(path.name for path in (out / "heads").iterdir()) == [
        f"{task}.safetensors" for task in TASKS
    ]
    for stage in ("merged", "calibrated"):
        names = {path.name for path in (out / stage).iterdir()}
        assert names == {
            "README.md",
            "config.json",
            "manifest.json",
            "model.safetensors",
            "preprocessor_config.json",
        }
        model, loading = CLIPVisionModel.from_pretrained(out / stage, output_loading_info=True)
        assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert all(
            torch.equal(model.state_dict()[name], tensor) for name, tensor in weights(out / stage).items()
        )


def test_the_report_tells_scores_drift_solves_and_cost(workshop: Path, tmp_path: Path) -> None:
    report = run(workshop, tmp_path / "out")

    for task in report.tasks.values():
        assert task.scores.expert == 1.0
        assert task.scores.base is not None
        assert task.scores.merged is not None
        assert task.normalised.calibrated == task.scores.calibrated
        assert (task.test_examples, task.calibration_used, task.overlap) == (60, 40, 0)
    assert [row.block for row in report.drift.mean] == [f"encoder.layers.{index}" for index in range(3)]
    middle = report.drift.mean[1]
    assert middle.merged is not None
    assert middle.calibrated is not None
    assert middle.calibrated.distance < middle.merged.distance
    assert {stage.name for stage in report.stages} == {"hash inputs", "merge", "calibrate", "evaluate"}
    assert all(stage.peak_bytes > 0 for stage in report.stages)
    # The last block's q and its k and v weigh tokens differently: five feeds there, four in the others.
    assert len(report.solver) == 4 + 4 + 5
    assert {fate.state for fate in report.parameters.values()} == {"solved", "merged"}
    assert len(report.parameters) == len(weights(tmp_path / "out" / "merged"))


def test_the_manifest_names_every_input_by_content(workshop: Path, tmp_path: Path) -> None:
    import hashlib

    run(workshop, tmp_path / "out")

    manifest = json.loads((tmp_path / "out" / "calibrated" / "manifest.json").read_text())
    assert manifest["inputs"].keys() == {"base", *(f'expert "{task}"' for task in TASKS)}
    recorded = manifest["inputs"]["base"]["files"]["model.safetensors"]["sha256"]
    assert recorded == hashlib.sha256((workshop / "base" / "model.safetensors").read_bytes()).hexdigest()
    assert torch.__version__.startswith(manifest["versions"]["torch"])
    assert manifest["seed"] == 0
    assert manifest["spec"]["merge"]["type"] == "average"
    assert manifest["calibration"]["digits"]["used"] == 40


def test_a_second_run_of_the_same_spec_does_nothing(workshop: Path, tmp_path: Path) -> None:
    first = run(workshop, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}

    second = run(workshop, tmp_path / "out")

    assert second == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")} == before


def test_what_is_missing_is_made_again_and_nothing_else(workshop: Path, tmp_path: Path) -> None:
    run(workshop, tmp_path / "out")
    merged = (tmp_path / "out" / "merged" / "model.safetensors").stat().st_mtime_ns
    calibrated = weights(tmp_path / "out" / "calibrated")
    (tmp_path / "out" / "calibrated" / "model.safetensors").unlink()

    run(workshop, tmp_path / "out")

    assert (tmp_path / "out" / "merged" / "model.safetensors").stat().st_mtime_ns == merged
    again = weights(tmp_path / "out" / "calibrated")
    assert all(torch.equal(again[name], tensor) for name, tensor in calibrated.items())


def test_a_folder_made_from_another_spec_is_refused_with_both_values(workshop: Path, tmp_path: Path) -> None:
    run(workshop, tmp_path / "out", calibrate=[])

    with pytest.raises(
        OutputError, match=r'made from another spec[\s\S]*merge\.type: "average" there, "ties" now'
    ):
        run(workshop, tmp_path / "out", calibrate=[], merge={"type": "ties"})


def test_overwriting_keeps_the_users_own_files(workshop: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(workshop, out)
    (out / "notes.txt").write_text("mine")
    (out / "merged" / "notes.txt").write_text("mine too")

    Pipeline.from_spec(spec_of(workshop, merge={"type": "ties"}, calibrate=[])).run(out, overwrite=True)

    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "merged" / "notes.txt").read_text() == "mine too"
    assert not (out / "calibrated" / "model.safetensors").exists()


def test_an_expert_that_changed_is_noticed_by_its_content(workshop: Path, tmp_path: Path) -> None:
    import shutil

    moved = tmp_path / "workshop"
    shutil.copytree(workshop, moved)
    run(moved, tmp_path / "out", calibrate=[])
    expert = moved / "digits" / "model.safetensors"
    before = weights(tmp_path / "out" / "merged")
    save_file({name: tensor + 0.01 for name, tensor in load_file(expert).items()}, expert, {"format": "pt"})

    run(moved, tmp_path / "out", calibrate=[])

    after = weights(tmp_path / "out" / "merged")
    assert all(torch.allclose(after[name], before[name] + 0.01 / 3, atol=1e-6) for name in before)


def test_until_merge_stops_there_and_a_full_run_goes_on(workshop: Path, tmp_path: Path) -> None:
    pipeline = Pipeline.from_spec(spec_of(workshop))

    half = pipeline.run(tmp_path / "out", until="merge")
    assert half.checkpoint == str(tmp_path / "out" / "merged")
    assert not (tmp_path / "out" / "calibrated").exists()
    made = (tmp_path / "out" / "merged" / "model.safetensors").stat().st_mtime_ns

    whole = pipeline.run(tmp_path / "out")
    assert whole.checkpoint == str(tmp_path / "out" / "calibrated")
    assert (tmp_path / "out" / "merged" / "model.safetensors").stat().st_mtime_ns == made


def test_calibrators_are_applied_in_order_and_plugins_kept_beside(workshop: Path, tmp_path: Path) -> None:
    surgery = {"type": "surgery", "iterations": 20}

    report = run(workshop, tmp_path / "out", calibrate=[{"type": "featcal"}, surgery])

    assert report.changes_inference
    assert "at inference" in report.inference_note.lower()
    alone = run(workshop, tmp_path / "featcal")
    both, one = weights(tmp_path / "out" / "calibrated"), weights(tmp_path / "featcal" / "calibrated")
    assert all(torch.equal(both[name], one[name]) for name in one)
    assert {f"{task}.surgery.safetensors" for task in TASKS} < {
        p.name for p in (tmp_path / "out" / "heads").iterdir()
    }
    assert [fate.state for fate in report.parameters.values()] == [
        fate.state for fate in alone.parameters.values()
    ]


def test_a_model_merged_elsewhere_is_calibrated(workshop: Path, tmp_path: Path) -> None:
    run(workshop, tmp_path / "first", calibrate=[])
    elsewhere = {"type": "checkpoint", "model": str(tmp_path / "first" / "merged")}

    run(workshop, tmp_path / "second", merge=elsewhere)
    run(workshop, tmp_path / "direct")

    found, wanted = (weights(tmp_path / name / "calibrated") for name in ("second", "direct"))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_output_dtype_and_shards_are_as_asked(workshop: Path, tmp_path: Path) -> None:
    from transformers import CLIPVisionModel

    run(workshop, tmp_path / "out", calibrate=[], output={"dtype": "bfloat16", "shard_size": "40kB"})

    merged = tmp_path / "out" / "merged"
    index = json.loads((merged / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert json.loads((merged / "config.json").read_text())["dtype"] == "bfloat16"
    model = CLIPVisionModel.from_pretrained(merged)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_hub_id_is_found_in_an_offline_cache(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    import huggingface_hub.constants as constants

    commit, repo = "0123456789abcdef0123456789abcdef01234567", tmp_path / "hub" / "models--someone--base"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    for path in (workshop / "base").iterdir():
        blob = repo / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(path.read_bytes())
        link = repo / "snapshots" / commit / path.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path("..") / ".." / "blobs" / blob.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    run(workshop, tmp_path / "out", base="someone/base")
    run(workshop, tmp_path / "local")

    found, wanted = (weights(tmp_path / name / "calibrated") for name in ("out", "local"))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    manifest = json.loads((tmp_path / "out" / "merged" / "manifest.json").read_text())
    assert manifest["inputs"]["base"]["revision"] == commit


def test_every_misfit_of_every_expert_is_told_at_once(workshop: Path, tmp_path: Path) -> None:
    for task, change in (("digits", "shape"), ("letters", "name")):
        (tmp_path / task).mkdir()
        tensors = load_file(workshop / task / "model.safetensors")
        if change == "shape":
            tensors["post_layernorm.weight"] = torch.zeros(7)
        else:
            tensors["encoder.extra.weight"] = tensors.pop("encoder.layers.2.mlp.fc2.bias")
        save_file(tensors, tmp_path / task / "model.safetensors", {"format": "pt"})
        (tmp_path / task / "config.json").write_bytes((workshop / task / "config.json").read_bytes())
    experts = {
        **spec_of(workshop)["experts"],
        "digits": str(tmp_path / "digits"),
        "letters": str(tmp_path / "letters"),
    }

    with pytest.raises(CheckpointError) as caught:
        run(workshop, tmp_path / "out", experts=experts)

    text = str(caught.value)
    for words in (
        "post_layernorm.weight",
        "base 32, expert 7",
        "encoder.layers.2.mlp.fc2.bias",
        "encoder.extra.weight",
    ):
        assert words in text
    assert not (tmp_path / "out").exists()


PLUGIN = '''
import merging

@merging.strategy("{name}")
class Rule(merging.TensorMerger):
    """Coordinate-wise median of the experts."""
    def combine(self, name, base_S, deltas_NS):
        {body}
'''


def test_a_rule_from_a_file_named_in_the_spec_runs(workshop: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(
        PLUGIN.format(name="median_of_experts", body="return base_S + deltas_NS.median(dim=0).values")
    )
    spec = spec_of(workshop, merge={"type": "median_of_experts"}, plugins=["rules.py"], calibrate=[])
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    Pipeline.from_spec(tmp_path / "spec.json").run(tmp_path / "out")

    experts = [load_file(workshop / task / "model.safetensors") for task in TASKS]
    for name, tensor in weights(tmp_path / "out" / "merged").items():
        wanted = torch.stack([expert[name] for expert in experts]).median(dim=0).values
        assert torch.allclose(tensor, wanted, atol=1e-7)
    assert "median_of_experts" in merging.available("strategies")


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        (
            "wrong_shape",
            "return base_S[:1]",
            r'"wrong_shape" returned shape \(1.*"embeddings\.class_embedding"',
        ),
        (
            "raises",
            "raise ValueError('boom')",
            r'"raises" failed on tensor "embeddings\.class_embedding".*boom',
        ),
    ],
)
def test_a_rule_that_fails_is_named_and_leaves_nothing(
    workshop: Path, tmp_path: Path, name: str, body: str, words: str
) -> None:
    (tmp_path / "rules.py").write_text(PLUGIN.format(name=name, body=body))
    spec = spec_of(workshop, merge={"type": name}, plugins=["rules.py"], calibrate=[])
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    with pytest.raises(RuleError, match=words):
        Pipeline.from_spec(tmp_path / "spec.json").run(tmp_path / "out")

    assert [path.name for path in (tmp_path / "out").iterdir()] == [".merging"]


def test_a_plan_tells_coefficients_sizes_and_what_stays(workshop: Path) -> None:
    plan = Pipeline.from_spec(spec_of(workshop)).plan()

    assert [expert.coefficient for expert in plan.experts.values()] == pytest.approx([1 / 3] * 3)
    assert plan.stacks == {"encoder.layers": 3}
    assert [step.method for step in plan.steps] == ["average", "featcal", "scores and drift"]
    assert plan.steps[1].solved == 3 * (6 * 2 + 2 * 2)
    assert plan.disk_bytes == 2 * plan.base.bytes


def test_an_unknown_device_is_refused_at_once(workshop: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r'device "cuda:7" cannot be used'):
        Pipeline.from_spec(spec_of(workshop, device="cuda:7")).run(tmp_path / "out")


CHILD = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
from merging.pipeline import Pipeline
left = int(sys.argv[3])
def progress(stage, done, total):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    print(stage, flush=True)
Pipeline.from_spec(json.load(open(sys.argv[1]))).run(sys.argv[2], progress=progress)
"""


def child(spec: Path, out: Path, events: int) -> subprocess.CompletedProcess[str]:
    """A run that kills itself at that many signs of progress."""
    command = [sys.executable, "-c", CHILD, str(spec), str(out), str(events)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ})


def test_a_killed_run_leaves_nothing_half_and_the_next_one_ends_with_the_same_bytes(
    workshop: Path, tmp_path: Path
) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(spec_of(workshop)))
    undisturbed = child(tmp_path / "spec.json", tmp_path / "whole", 10**9)
    assert undisturbed.returncode == 0, undisturbed.stderr
    stages = undisturbed.stdout.split("\n")[:-1]
    moments = [
        2,  # while inputs are hashed
        stages.index("merge") + 20,  # while the merge is written
        stages.index("sweep") + 2,  # after the merge, in the first block
        len(stages) - stages[::-1].index("sweep") - 1,  # in the last block
        len(stages) - 1,  # after the calibration, while it is measured
    ]
    for moment in moments:
        out = tmp_path / f"killed-at-{moment}"

        killed = child(tmp_path / "spec.json", out, moment)

        assert killed.returncode == -signal.SIGKILL
        for stage in ("merged", "calibrated"):
            if (out / stage).exists():  # then it is whole
                found, wanted = weights(out / stage), weights(tmp_path / "whole" / stage)
                assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        assert not (out / "report.json").exists()

        run(workshop, out)

        for file in ("merged/model.safetensors", "calibrated/model.safetensors", "merged/config.json"):
            assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
        left = sorted(path.name for path in out.iterdir())
        assert left == [".merging", "calibrated", "heads", "merged", "report.json"]


def test_two_runs_into_one_folder_do_not_meet(workshop: Path, tmp_path: Path) -> None:
    def meanwhile(stage: str, done: int, total: int) -> None:
        with pytest.raises(OutputError, match=r"another run \(pid \d+\) is working"):
            run(workshop, tmp_path / "out")

    Pipeline.from_spec(spec_of(workshop, tasks={}, calibrate=[])).run(tmp_path / "out", progress=meanwhile)


def test_all_errors_are_of_one_family() -> None:
    assert issubclass(OutputError, MergingError)
    assert merging.MergingError is MergingError


def changed(workshop: Path, tmp_path: Path, task: str, change: Any) -> dict[str, Any]:
    """The spec with one expert's tensors changed in place."""
    import shutil

    shutil.copytree(workshop / task, tmp_path / task)
    tensors = load_file(workshop / task / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / task / "model.safetensors", {"format": "pt"})
    return spec_of(workshop, experts={**spec_of(workshop)["experts"], task: str(tmp_path / task)})


@pytest.mark.parametrize("rule", ["average", "ties", "regmean"])
def test_a_single_nan_is_traced_to_expert_and_tensor(workshop: Path, tmp_path: Path, rule: str) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["encoder.layers.1.mlp.fc1.weight"][2, 3] = float("nan")

    spec = {**changed(workshop, tmp_path, "letters", spoil), "merge": {"type": rule}}

    with pytest.raises(
        CheckpointError, match=r'expert "letters": encoder\.layers\.1\.mlp\.fc1\.weight: 1 values'
    ):
        Pipeline.from_spec(spec).run(tmp_path / "out")

    assert not (tmp_path / "out" / "merged").exists()


def test_an_expert_of_another_base_stops_the_run_unless_allowed(workshop: Path, tmp_path: Path) -> None:
    def replace(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)) * 0.02

    spec = {**changed(workshop, tmp_path, "signs", replace), "calibrate": []}

    with pytest.raises(
        CheckpointError, match=r'expert "signs".*another base[\s\S]*"allow": \["other_base"\]'
    ):
        Pipeline.from_spec(spec).run(tmp_path / "out")
    report = Pipeline.from_spec({**spec, "allow": ["other_base"]}).run(tmp_path / "out2")
    assert any("another base" in warning for warning in report.warnings)


def test_a_config_that_changes_what_weights_mean_stops_the_run(workshop: Path, tmp_path: Path) -> None:
    spec = changed(workshop, tmp_path, "digits", lambda tensors: None)
    place = tmp_path / "digits" / "config.json"
    place.write_text(
        json.dumps({**json.loads(place.read_text()), "hidden_act": "gelu", "num_attention_heads": 8})
    )

    with pytest.raises(CheckpointError) as caught:
        Pipeline.from_spec(spec).validate()

    text = str(caught.value)
    assert "hidden_act 'gelu', the base has 'quick_gelu'" in text
    assert "num_attention_heads 8, the base has 4" in text
