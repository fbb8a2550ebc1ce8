"""What importing the package costs, and that its README tells the truth."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import merging
from merging.pipeline import Pipeline

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
HEAVY = ("torch", "transformers", "numpy", "open_clip", "accelerate")


def imported_by(code: str) -> list[str]:
    """Heavy packages that a fresh interpreter has loaded after the code."""
    command = f"{code}\nimport sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert imported_by("import merging") == []


def test_defining_a_rule_and_listing_methods_load_nothing_heavy() -> None:
    rule = "import merging\nclass Rule(merging.TensorMerger):\n    def combine(self, n, b, d): return b\n"

    assert (
        imported_by(f"{rule}\nmerging.available('strategies'); from merging.spec import schema; schema()")
        == []
    )


def test_every_public_name_is_there() -> None:
    for name in merging.__all__:
        assert getattr(merging, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Piepline'"):
        merging.Piepline  # noqa: B018


def test_the_rule_in_the_readme_runs_from_a_spec(tmp_path: Path) -> None:
    block = next(
        code for code in re.findall(r"```python\n(.*?)```", README, re.S) if "@merging.strategy" in code
    )
    assert len(block.splitlines()) < 20
    (tmp_path / "my_rules.py").write_text(block.replace('"median"', '"median_of_the_readme"'))
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(3, 4, generator=generator)
    tensors = [{"w": base + noise * torch.randn(3, 4, generator=generator)} for noise in (0, 0.1, 0.1, 0.1)]
    for name, state in zip(("base", "a", "b", "c"), tensors, strict=True):
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
    spec = {
        "base": "base",
        "experts": {name: name for name in "abc"},
        "merge": {"type": "median_of_the_readme"},
        "plugins": ["my_rules.py"],
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    Pipeline.from_spec(tmp_path / "spec.json").run(tmp_path / "out")

    found = load_file(tmp_path / "out" / "merged" / "model.safetensors")["w"]
    wanted = torch.stack([state["w"] for state in tensors[1:]]).median(dim=0).values
    assert torch.allclose(found, wanted, atol=1e-6)


def test_the_spec_in_the_readme_is_valid(tmp_path: Path) -> None:
    spec = json.loads(
        next(code for code in re.findall(r"```json\n(.*?)```", README, re.S) if '"base"' in code)
    )
    for place in (spec["base"], *[expert for expert in spec["experts"].values() if "hub" not in expert]):
        (tmp_path / place).mkdir(parents=True)
    for task in spec["tasks"].values():
        for source in task.values():
            place = tmp_path / source["path"]
            (place.parent if place.suffix else place).mkdir(parents=True, exist_ok=True)
            if place.suffix:
                place.touch()
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    Pipeline.from_spec(tmp_path / "spec.json")
