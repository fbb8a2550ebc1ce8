"""Requests as people make them: nothing needless is asked for, what cannot work is told before the work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import made
from torch import nn

from merging import task_opening
from merging.errors import DataError, SpecError, TracingError
from merging.pipeline import Pipeline


def suite(folder: Path, model: nn.Module, batch: dict[str, torch.Tensor], **changes: Any) -> dict[str, Any]:
    """Base, two experts that differ from it by noise, calibration examples; no heads, no tests."""
    model.save_pretrained(folder / "base")
    spec: dict[str, Any] = {
        "base": str(folder / "base"),
        "experts": {},
        "merge": {"type": "average"},
        "calibrate": {"type": "featcal"},
        "tasks": {},
        "device": "cpu",
    }
    for seed, task in enumerate(("one", "two"), start=1):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.005 * torch.randn_like(parameter)
        model.save_pretrained(folder / task)
        save_file(batch, folder / f"{task}.safetensors")
        spec["experts"][task] = str(folder / task)
        source = {"type": "tensors", "path": str(folder / f"{task}.safetensors")}
        spec["tasks"][task] = {"calibration": source}
    return {**spec, **changes}


def test_a_model_with_a_pooler_needs_no_head_to_be_calibrated(tmp_path: Path) -> None:
    _, model, batches = made("vit")

    report = Pipeline.from_spec(suite(tmp_path, model, batches[0])).run(tmp_path / "out")

    assert report.parameters["pooler.dense.weight"].state == "copied"
    assert report.parameters["encoder.layer.0.attention.attention.query.weight"].state == "solved"


def test_a_decoder_without_inputs_is_started_with_its_first_token(tmp_path: Path) -> None:
    _, model, batches = made("t5")
    batch = {name: value for name, value in batches[0].items() if name != "decoder_input_ids"}

    report = Pipeline.from_spec(suite(tmp_path, model, batch)).run(tmp_path / "out")

    assert {fate.state for fate in report.parameters.values()} >= {"solved", "merged"}


def test_inputs_of_a_wrong_size_are_refused_before_the_run(tmp_path: Path) -> None:
    _, model, _ = made("clip")
    spec = suite(tmp_path, model, {"pixel_values": torch.randn(4, 3, 30, 30)})

    with pytest.raises(DataError, match=r"calibration: its pictures are 3 x 30 x 30, the model takes 3 x 32"):
        Pipeline.from_spec(spec).run(tmp_path / "out")


def test_inputs_that_the_model_stumbles_over_are_told_with_task_and_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model, _ = made("clip")
    spec = suite(tmp_path, model, {"pixel_values": torch.randn(4, 3, 30, 30)})
    monkeypatch.setattr(task_opening, "picture_problem", lambda *_: "")

    with pytest.raises(TracingError, match=r"student one, batch 0 \(pixel_values \(4, 3, 30, 30\)\)"):
        Pipeline.from_spec(spec).run(tmp_path / "out")


def test_results_inside_an_experts_folder_are_refused(tmp_path: Path) -> None:
    _, model, batches = made("clip")
    inside = {"path": str(tmp_path / "one" / "deep" / "out")}

    with pytest.raises(SpecError, match=r'output\.path: is the folder of expert "one", or inside it'):
        Pipeline.from_spec(suite(tmp_path, model, batches[0], output=inside))


def test_findings_that_do_not_exist_cannot_be_allowed(tmp_path: Path) -> None:
    _, model, batches = made("clip")

    with pytest.raises(SpecError, match=r'"bogus", expected "config", "other_base", "overlap"'):
        Pipeline.from_spec(suite(tmp_path, model, batches[0], allow=["bogus"]))


def test_what_a_plug_in_prints_stays_out_of_the_json(tmp_path: Path) -> None:
    _, model, batches = made("clip")
    (tmp_path / "loud.py").write_text(
        "import merging\nprint('HELLO')\n@merging.strategy('loud')\nclass Loud(merging.TensorMerger):\n"
        "    '''Says so.'''\n    def combine(self, name, base_S, deltas_NS):\n"
        "        print(name)\n        return base_S\n"
    )
    spec = suite(tmp_path, model, batches[0], merge={"type": "loud"}, plugins=["loud.py"], calibrate=[])
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "merging", "pipeline", "run", str(tmp_path / "spec.json"), "--json"]

    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert json.loads(done.stdout)["strategy"] == "loud"
    assert "HELLO" in done.stderr
