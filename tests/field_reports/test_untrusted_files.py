"""Files that hold code: whatever a run may read, nothing of it is executed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import adapted
from safetensors.torch import save_file
from small_models import llama, saved, spec_of

from merging.errors import MergingError
from merging.pipeline import Pipeline


class Trap:
    """Unpickling it writes a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return (open, (str(self.place), "w"))


PLACES = ["base", "expert.bin", "expert.pt", "adapter", "head", "data", "image", "merged"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_refused_wherever_it_is_named(tmp_path: Path, place: str, zipped: bool) -> None:
    trap = tmp_path / "pwned.txt"
    content = {"weight": torch.ones(2, 2), "trap": Trap(trap)}

    def write(file: Path) -> Path:
        file.parent.mkdir(parents=True, exist_ok=True)
        if zipped:
            torch.save(content, file)
        else:
            file.write_bytes(pickle.dumps(content))
        return file

    saved(llama(), tmp_path / "base")
    saved(llama(seed=1), tmp_path / "one")
    save_file({"input_ids": torch.zeros(2, 3, dtype=torch.long)}, tmp_path / "x.safetensors")
    adapted(llama(), tmp_path / "adapter", target_modules=["q_proj"])
    one: Any = str(tmp_path / "one")
    task: dict[str, Any] = {"calibration": {"type": "tensors", "path": str(tmp_path / "x.safetensors")}}
    merge: dict[str, Any] = {"type": "average"}
    if place == "base":
        (tmp_path / "base" / "model.safetensors").unlink()
        write(tmp_path / "base" / "pytorch_model.bin")
    elif place == "adapter":
        (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
        write(tmp_path / "adapter" / "adapter_model.bin")
        one = {"adapter": str(tmp_path / "adapter")}
    elif place == "head":
        task["head"] = {"type": "linear", "path": str(write(tmp_path / "head.safetensors"))}
    elif place == "data":
        task["calibration"]["path"] = str(write(tmp_path / "data.safetensors"))
    elif place == "image":
        write(tmp_path / "images" / "cat" / "one.png")
        task["calibration"] = {"type": "images", "path": str(tmp_path / "images")}
    elif place == "merged":
        merge = {"type": "checkpoint", "model": str(write(tmp_path / "merged.pt"))}
    else:
        one = str(write(tmp_path / place))
    spec = spec_of(tmp_path / "base", {"one": one}, merge, tasks={"one": task}, calibrate={"type": "featcal"})

    with pytest.raises(MergingError) as caught:
        Pipeline.from_spec(spec).run(tmp_path / "out")

    assert caught.value.exit_code == 2
    assert not trap.exists()
    assert not (tmp_path / "out" / "merged").exists()


def test_nothing_that_a_run_keeps_for_the_next_one_is_a_pickle(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "base")
    saved(llama(seed=1), tmp_path / "one")
    generator = torch.Generator().manual_seed(0)
    save_file({"input_ids": torch.randint(0, 64, (4, 9), generator=generator)}, tmp_path / "x.safetensors")
    task = {"calibration": {"type": "tensors", "path": str(tmp_path / "x.safetensors")}}
    kept: set[Path] = set()

    def look(stage: str, done: int, total: int) -> None:
        kept.update(file for file in (tmp_path / "out").rglob("*") if file.is_file())
        for file in list(kept):
            if file.is_file():
                head = file.read_bytes()[:2]
                assert head not in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05"), file

    spec = spec_of(
        tmp_path / "base",
        {"one": tmp_path / "one"},
        {"type": "average"},
        tasks={"one": task},
        calibrate=[{"type": "featcal"}, {"type": "surgery", "iterations": 2}],
        allow=["other_base"],
    )
    Pipeline.from_spec(spec).run(tmp_path / "out", progress=look)

    assert any("begun" in file.parts for file in kept)  # blocks that a killed run would go on from
    assert any(file.name.endswith(".surgery.safetensors") for file in (tmp_path / "out" / "heads").iterdir())
