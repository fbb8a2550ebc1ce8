"""The suite as a whole: what a second run keeps, what it refuses, and (slow) that experts are experts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from merging.demo import build, suite
from merging.errors import MergingError, OutputError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that is filled with empty parts instead of trained ones."""

    def make(made: Path, **_: object) -> None:
        for part in suite._PARTS:
            (made / part).parent.mkdir(parents=True, exist_ok=True)
            (made / part).write_text(part)

    monkeypatch.setattr(suite, "_make", make)
    return tmp_path / "cache"


def test_every_path_in_the_spec_is_made(cache: Path, tmp_path: Path) -> None:
    spec = json.loads(build(tmp_path / "demo", cache=cache).read_text())

    made = {
        spec["base"],
        *spec["experts"].values(),
        *(task["head"]["path"] for task in spec["tasks"].values()),
    }
    assert all((tmp_path / "demo" / path).exists() for path in made)
    assert spec["tasks"].keys() == spec["experts"].keys()


def test_a_second_run_makes_nothing_and_keeps_an_edited_spec(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build(tmp_path / "demo", cache=cache)
    path.write_text("{}")
    monkeypatch.setattr(suite, "_make", None)

    again = build(tmp_path / "demo", cache=cache)

    assert again.read_text() == "{}"


def test_editing_a_folder_leaves_the_cache_alone(cache: Path, tmp_path: Path) -> None:
    build(tmp_path / "demo", cache=cache)
    (tmp_path / "demo" / "models" / "digits").write_text("edited")

    build(tmp_path / "other", cache=cache)

    assert (tmp_path / "other" / "models" / "digits").read_text() == "models/digits"


def test_what_is_missing_in_a_folder_is_filled_in(cache: Path, tmp_path: Path) -> None:
    build(tmp_path / "demo", cache=cache)
    (tmp_path / "demo" / "models" / "digits").unlink()

    build(tmp_path / "demo", cache=cache)

    assert (tmp_path / "demo" / "models" / "digits").exists()


def test_a_folder_with_other_files_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text("{}")

    with pytest.raises(OutputError, match=r"not the demo's: spec\.json"):
        build(tmp_path, cache=cache)

    assert (tmp_path / "spec.json").read_text() == "{}"


def test_a_folder_of_another_version_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "demo", cache=cache)
    monkeypatch.setattr(suite, "fingerprint", lambda: "another")

    with pytest.raises(OutputError, match="another version"):
        build(tmp_path / "demo", cache=cache)


def test_the_cache_can_be_chosen(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGING_CACHE", str(tmp_path / "chosen"))

    build(tmp_path / "demo")

    assert (tmp_path / "chosen" / "demo" / suite.fingerprint() / "models" / "base").exists()


def test_missing_packages_are_named_with_the_line_that_installs_them() -> None:
    with pytest.raises(MergingError, match=r'needs no_such_module(.|\n)*pip install "merging\[demo\]"'):
        suite._require("json", "no_such_module")


def test_importing_the_demo_imports_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "PIL", "onnx", "sklearn", "transformers"]
    code = f"import sys, merging.demo; print([name for name in {heavy} if name in sys.modules])"

    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"


@pytest.mark.slow
def test_experts_are_far_better_than_the_base_under_the_same_heads(tmp_path: Path) -> None:
    import numpy as np
    import torch
    from PIL import Image
    from safetensors.torch import load_file
    from transformers import AutoImageProcessor

    from merging.demo.backbone import features_of_all, open_model, unit_scale

    folder = build(tmp_path / "demo").parent
    processor = AutoImageProcessor.from_pretrained(folder / "models" / "base", local_files_only=True)
    for task in suite.STEPS:
        classes = sorted(path for path in (folder / "data" / task / "test").iterdir())
        files = [
            (file, label) for label, of_class in enumerate(classes) for file in sorted(of_class.iterdir())
        ]
        pixels = np.stack([np.asarray(Image.open(file)) for file, _ in files])
        labels = torch.tensor([label for _, label in files])
        head = load_file(folder / "heads" / f"{task}.safetensors")
        accuracy = {}
        for model in ("base", task):
            features = features_of_all(open_model(folder / "models" / model), pixels)
            decided = torch.nn.functional.linear(features, head["weight"], head["bias"]).argmax(1)
            accuracy[model] = (decided == labels).double().mean().item()

        assert accuracy[task] > accuracy["base"] + 0.2
        assert accuracy[task] > 0.55
        mean, std = torch.tensor(processor.image_mean), torch.tensor(processor.image_std)
        shown = processor(images=Image.open(files[0][0]), return_tensors="pt")["pixel_values"][0]
        trained_on = (unit_scale(pixels[:1])[0] - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        assert torch.allclose(shown, trained_on, atol=1e-5)
