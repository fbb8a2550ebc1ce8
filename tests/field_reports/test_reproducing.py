"""The same again: what people report, and what they see here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import expert, llama, run, saved, spec_of, tensors_in
from torch import Tensor

from merging.pipeline import Pipeline

NAMES = ("one", "two", "three")
DARE = {"type": "dare", "density": 0.3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, base = tmp_path_factory.mktemp("models"), llama()
    saved(base, folder / "base")
    for seed, name in enumerate(NAMES, start=1):
        saved(expert(base, seed), folder / name)
    return folder


def spec(models: Path, names: tuple[str, ...] = NAMES, **changes: Any) -> dict[str, Any]:
    return spec_of(models / "base", {name: models / name for name in names}, DARE, **changes)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_random_merge_has_the_same_bytes_again_and_with_more_threads(models: Path, tmp_path: Path) -> None:
    first = run(tmp_path / "first", spec(models)) / "model.safetensors"
    again = run(tmp_path / "again", spec(models)) / "model.safetensors"
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        threaded = run(tmp_path / "threaded", spec(models)) / "model.safetensors"
    finally:
        torch.set_num_threads(threads)

    assert first.read_bytes() == again.read_bytes() == threaded.read_bytes()


def test_shards_and_order_of_listing_change_no_bit_of_a_random_merge(models: Path, tmp_path: Path) -> None:
    plain = tensors_in(run(tmp_path / "plain", spec(models)))
    sharded = tensors_of(run(tmp_path / "sharded", spec(models, output={"shard_size": "40kB"})))
    turned = tensors_in(run(tmp_path / "turned", spec(models, NAMES[::-1])))

    assert same(sharded, plain)
    assert same(turned, plain)


def test_the_seed_decides_and_is_recorded(models: Path, tmp_path: Path) -> None:
    one, other = (run(tmp_path / str(seed), spec(models, seed=seed)) for seed in (0, 7))

    assert not same(tensors_in(one), tensors_in(other))
    assert json.loads((other / "manifest.json").read_text())["seed"] == 7


def test_what_the_program_around_draws_changes_nothing(models: Path, tmp_path: Path) -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(tensors_in(run(tmp_path / str(seed), spec(models))))
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed)))

    assert same(*found)


def test_a_tensor_draws_the_same_whatever_else_the_model_has(models: Path) -> None:
    """Masks hang on seed, expert and name alone."""
    import merging

    base, one = (tensors_in(models / name) for name in ("base", "one"))
    name = "model.layers.1.mlp.up_proj.weight"

    whole = merging.merge("dare", base, {"one": one}, density=0.3)[name]
    alone = merging.merge("dare", {name: base[name]}, {"one": {name: one[name]}}, density=0.3)[name]

    assert torch.equal(whole, alone)


def test_a_run_that_was_interrupted_is_not_begun_anew(models: Path, tmp_path: Path) -> None:
    """The merge that was there before the evaluation failed is not made again."""

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "merge" and done == total:
            raise KeyboardInterrupt

    pipeline = Pipeline.from_spec(spec(models))
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(tmp_path / "out", progress=stop)
    first = pipeline.run(tmp_path / "out")
    made = (Path(first.checkpoint) / "model.safetensors").stat().st_mtime_ns

    again = Pipeline.from_spec(spec(models)).run(tmp_path / "out")

    assert (Path(again.checkpoint) / "model.safetensors").stat().st_mtime_ns == made
