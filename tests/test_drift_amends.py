"""`drift` after a run: report, model card and manifests stay in step, also where it is killed between two of
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import PICTURE, SIZE, expert_of, pixels

import merging.checkpoints.amending as amending
import merging.drifting as drifting
from merging.pipeline import Pipeline
from merging.verifying import verify

WRITES = 5  # report, its manifest, model card, its manifest, and the hash of that in the first


class Killed(BaseException):
    """Stands for a kill, where a test wants to go on in one process."""


def test_killed_between_any_two_writes_the_next_call_mends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    base = CLIPVisionModel(CLIPVisionConfig(**{**SIZE, "num_hidden_layers": 1}, **PICTURE)).eval()
    base.save_pretrained(tmp_path / "base")
    base.load_state_dict(expert_of(base, 1))
    base.save_pretrained(tmp_path / "digits")
    save_file(pixels(4), tmp_path / "digits.safetensors")
    pipeline = Pipeline.from_spec(
        {
            "base": str(tmp_path / "base"),
            "experts": {"digits": str(tmp_path / "digits")},
            "tasks": {
                "digits": {"calibration": {"type": "tensors", "path": str(tmp_path / "digits.safetensors")}}
            },
            "merge": {"type": "average"},
            "calibrate": {"type": "featcal"},
            "device": "cpu",
        }
    )
    out, measured = tmp_path / "out", []
    pipeline.drift(out, frechet=False)
    assert verify(out).unchanged
    true_measure, true_write = drifting.measure_drift, amending.write_atomic

    def measure(*arguments: Any, **named: Any) -> Any:
        if not measured:
            measured.append(true_measure(*arguments, **named))
        return measured[0]

    monkeypatch.setattr(drifting, "measure_drift", measure)
    for last in range(WRITES):
        kill_at(monkeypatch, last, harm := f"harm {last}")
        with pytest.raises(Killed):
            pipeline.drift(out, frechet=False)
        monkeypatch.setattr(amending, "write_atomic", true_write)

        pipeline.drift(out, frechet=False)

        assert harm in (out / "calibrated" / "README.md").read_text()
        assert verify(out).unchanged


def kill_at(monkeypatch: pytest.MonkeyPatch, last: int, harm: str) -> None:
    """Let the next call find something else to tell, and die instead of its write of that number."""
    true_write, written = amending.write_atomic, []

    def write(path: Path, text: str, *, scratch: Path) -> None:
        if len(written) == last:
            raise Killed
        written.append(path)
        true_write(path, text, scratch=scratch)

    monkeypatch.setattr(drifting, "harm_finding", lambda drift: harm)
    monkeypatch.setattr(amending, "write_atomic", write)
