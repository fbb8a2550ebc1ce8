"""A checkpoint is opened again before it is shown: what would not load, or answers NaN, never appears."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_requests import suite
from tiny_models import made

from merging.errors import MergingError, NumericalError
from merging.pipeline import Pipeline
from merging.reloading import reload_check

RULE = '''
import merging

@merging.strategy("grows_without_end")
class Rule(merging.TensorMerger):
    """Grows."""
    def combine(self, name, base_S, deltas_NS):
        return base_S * 1e30 if ".mlp." in name else base_S
'''


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    _, model, batches = made("llama")
    return suite(tmp_path, model, batches[0], calibrate=[])


def test_finite_weights_that_answer_nan_are_not_published(tmp_path: Path, spec: dict[str, Any]) -> None:
    (tmp_path / "grows.py").write_text(RULE)
    spec |= {"merge": {"type": "grows_without_end"}, "plugins": [str(tmp_path / "grows.py")]}

    with pytest.raises(NumericalError, match=r'block "model\.layers\.0" answers \d+ of \d+ values') as caught:
        Pipeline.from_spec(spec).run(tmp_path / "out")

    assert 'first example of task "one"' in str(caught.value)
    assert caught.value.exit_code == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".merging"]


def checked(folder: Path, spec: dict[str, Any]) -> None:
    pipeline = Pipeline.from_spec(spec)
    reload_check(
        folder,
        "merged",
        spec=pipeline.spec,
        opened=pipeline.resolve(),
        tasks=pipeline.tasks(),
        device="cpu",
    )


@pytest.mark.parametrize("form", ["model", "lora"])
def test_a_whole_checkpoint_passes(tmp_path: Path, spec: dict[str, Any], form: str) -> None:
    Pipeline.from_spec({**spec, "output": {"form": form}}).run(tmp_path / "out")

    checked(tmp_path / "out" / "merged", spec)


def _without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _of_another_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _cut_short(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def _with_another_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_without_a_tensor, r"model\.norm\.weight: is missing"),
        (_of_another_shape, r"model\.norm\.weight: is \(7,\), the base has \(32,\)"),
        (_cut_short, r"model\.safetensors"),
        (_with_another_config, r"mlp\.\w+\.weight is .* by the config"),
    ],
)
def test_a_checkpoint_that_would_not_load_is_told_with_its_tensor(
    tmp_path: Path, spec: dict[str, Any], damage: Any, words: str
) -> None:
    shutil.copytree(tmp_path / "base", tmp_path / "made")
    damage(tmp_path / "made")

    with pytest.raises(MergingError, match=words) as caught:
        checked(tmp_path / "made", spec)

    assert "the merged model is not published" in str(caught.value)
