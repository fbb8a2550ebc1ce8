"""The suite as a whole: what a second run keeps, what it refuses, and (slow) that experts are experts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from merging.demo import SUITES, Suite, build
from merging.demo import suite as suites
from merging.errors import MergingError, OutputError


@pytest.fixture(params=SUITES)
def suite(request: pytest.FixtureRequest) -> Suite:
    """A suite whose parts are texts instead of trained models, made without any package."""
    real = SUITES[request.param]

    def make(made: Path, *_: object) -> None:
        for part in real.parts:
            (made / part).parent.mkdir(parents=True, exist_ok=True)
            (made / part).write_text(part)

    return replace(real, make=make, packages=(), needs=())


@pytest.fixture
def built(suite: Suite, tmp_path: Path) -> Callable[..., Path]:
    return lambda folder, one=suite: build(tmp_path / folder, one, cache=tmp_path / "cache")


def never(*_: object) -> None:
    raise AssertionError("made again")


def test_every_path_in_the_spec_is_made(built: Callable[..., Path], tmp_path: Path, suite: Suite) -> None:
    spec = json.loads(built("demo").read_text())

    made = {
        spec["base"],
        *spec["experts"].values(),
        *(task["head"]["path"] for task in spec["tasks"].values() if "head" in task),
    }
    assert made | {f"data/{task}" for task in spec["tasks"]} == set(suite.parts)
    assert all((tmp_path / "demo" / part).exists() for part in suite.parts)
    assert spec["tasks"].keys() == spec["experts"].keys()


def test_the_spec_is_valid(suite: Suite, tmp_path: Path) -> None:
    from merging.spec import parse_spec

    spec = json.loads(json.dumps(suite.spec))
    sources = [part for task in spec["tasks"].values() for part in task.values() if isinstance(part, dict)]
    for path in [spec["base"], *spec["experts"].values(), *(source["path"] for source in sources)]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch() if Path(path).suffix else (tmp_path / path).mkdir()

    parsed = parse_spec(spec, tmp_path, "spec")

    assert list(parsed.tasks) == list(parsed.experts)


def test_the_folder_says_where_everything_comes_from(built: Callable[..., Path], suite: Suite) -> None:
    folder = built("demo").parent

    told = (folder / "SOURCES.md").read_text()

    assert suite.origin in told
    real = SUITES[suite.name]
    assert all(package.licence and package.requirement in real.sources for package in real.packages)


def test_a_second_run_makes_nothing_and_keeps_an_edited_spec(
    built: Callable[..., Path], suite: Suite
) -> None:
    path = built("demo")
    path.write_text("{}")

    again = built("demo", replace(suite, make=never))

    assert again.read_text() == "{}"


def test_editing_a_folder_leaves_the_cache_alone(
    built: Callable[..., Path], tmp_path: Path, suite: Suite
) -> None:
    built("demo")
    expert = suite.parts[1]
    (tmp_path / "demo" / expert).write_text("edited")

    built("other", replace(suite, make=never))

    assert (tmp_path / "other" / expert).read_text() == expert


def test_what_is_missing_in_a_folder_is_filled_in(
    built: Callable[..., Path], tmp_path: Path, suite: Suite
) -> None:
    built("demo")
    (tmp_path / "demo" / suite.parts[1]).unlink()

    built("demo", replace(suite, make=never))

    assert (tmp_path / "demo" / suite.parts[1]).exists()


def test_a_folder_with_other_files_is_refused(built: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "spec.json").write_text("{}")

    with pytest.raises(OutputError, match=r"not the demo's: spec\.json"):
        built("taken")

    assert (tmp_path / "taken" / "spec.json").read_text() == "{}"


def test_a_folder_of_another_version_is_refused(
    built: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built("demo")
    monkeypatch.setattr(suites, "fingerprint", lambda suite: "another")

    with pytest.raises(OutputError, match="another version"):
        built("demo")


def test_a_folder_of_another_suite_is_refused(built: Callable[..., Path], suite: Suite) -> None:
    (other,) = set(SUITES) - {suite.name}
    built("demo")

    with pytest.raises(OutputError, match="another suite"):
        built("demo", SUITES[other])


def test_suites_have_recipes_of_their_own() -> None:
    recipes = {suites.fingerprint(suite) for suite in SUITES.values()}

    assert len(recipes) == len(SUITES)


def test_the_cache_can_be_chosen(suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGING_CACHE", str(tmp_path / "chosen"))

    build(tmp_path / "demo", suite)

    assert (tmp_path / "chosen" / "demo" / suites.fingerprint(suite) / "models" / "base").exists()


def test_missing_packages_are_named_with_the_line_that_installs_them() -> None:
    with pytest.raises(MergingError, match=r'needs no_such_module(.|\n)*pip install "merging\[demo\]"'):
        suites._require("json", "no_such_module")


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

    from merging.demo.vision.backbone import features_of_all, open_model, unit_scale
    from merging.demo.vision.suite import STEPS

    folder = build(tmp_path / "demo", SUITES["vision"]).parent
    processor = AutoImageProcessor.from_pretrained(folder / "models" / "base", local_files_only=True)
    for task in STEPS:
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
