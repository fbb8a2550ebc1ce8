"""Experts that say nothing of their own are warned of by name, before the run and in its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import adapted
from safetensors.torch import load_file, save_file
from tiny_models import PICTURE, SIZE

from merging.pipeline import Pipeline


def plain(folder: Path, **changes: dict[str, float]) -> dict[str, Any]:
    """A spec of plain tensors; experts by what is added to which of the base's."""
    torch.manual_seed(0)
    base = {"first": torch.randn(40, 30), "second": torch.randn(40, 30), "bias": torch.randn(40)}
    for name, shifts in {"base": {}, **changes}.items():
        (folder / name).mkdir()
        tensors = {key: tensor + shifts.get(key, 0.0) for key, tensor in base.items()}
        save_file(tensors, folder / name / "model.safetensors")
    experts = {name: str(folder / name) for name in changes}
    return {"base": str(folder / "base"), "experts": experts, "merge": "average", "device": "cpu"}


def told(spec: dict[str, Any], *, read_weights: bool = True) -> list[str]:
    found = Pipeline.from_spec(spec).validate(read_weights=read_weights)
    return [note for note in found if "[same_weights]" in note]


def test_an_expert_that_is_the_base_and_one_given_twice_are_named(tmp_path: Path) -> None:
    spec = plain(tmp_path, own={"first": 0.1}, base_again={}, twin={"first": 0.1}, other={"second": 0.1})

    found = told(spec)

    assert len(found) == 2
    assert found[0].startswith('expert "base_again": its weights are the base\'s own [same_weights]')
    assert found[1].startswith('expert "twin": its weights are those of expert "own"')
    assert told({**spec, "allow": ["same_weights"]}) == []


def test_it_is_a_warning_of_the_report_and_stops_nothing(tmp_path: Path) -> None:
    spec = plain(tmp_path, own={"first": 0.1}, base_again={})

    report = Pipeline.from_spec(spec).run(tmp_path / "out")

    assert [one for one in report.warnings if "same_weights" in one and "base_again" in one]
    assert (tmp_path / "out" / "merged" / "model.safetensors").is_file()


@pytest.mark.parametrize("key", ["bias", "second"])
def test_one_that_differs_in_a_bias_or_the_last_matrix_is_another(tmp_path: Path, key: str) -> None:
    assert told(plain(tmp_path, own={key: 1e-3}, other={key: 2e-3})) == []


def test_rows_behind_those_looked_at_count_where_all_are_read(tmp_path: Path) -> None:
    spec = plain(tmp_path, own={})
    file = tmp_path / "own" / "model.safetensors"
    tensors = load_file(file)
    tensors["second"][-1] += 0.1
    save_file(tensors, file)

    assert told(spec) == []
    (found,) = told(spec, read_weights=False)
    assert "as far as was looked at (the first rows of each matrix)" in found


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_as_it_was_before_training_is_named(tmp_path: Path) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    model = CLIPVisionModel(CLIPVisionConfig(**SIZE, **PICTURE)).eval()
    model.save_pretrained(tmp_path / "base")
    targets = {"target_modules": ["q_proj"]}
    adapted(model, tmp_path / "fresh", init_lora_weights=True, **targets)
    adapted(model, tmp_path / "trained", **targets)
    experts = {name: {"adapter": str(tmp_path / name)} for name in ("fresh", "trained")}
    spec = {"base": str(tmp_path / "base"), "experts": experts, "merge": "average", "device": "cpu"}

    for _ in range(2):  # the second time what was compared is remembered
        (found,) = told(spec)
        assert found.startswith(
            'expert "fresh": its adapter changes nothing: all that it adds to the base is'
        )
        Pipeline.from_spec(spec).run(tmp_path / "out")
