"""LoraSink: what it writes, PEFT and this package read alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import loaded
from safetensors.torch import load_file

from merging.checkpoints.lora import open_adapter
from merging.checkpoints.lora_roles import outline_of
from merging.checkpoints.lora_sink import LoraSink
from merging.checkpoints.names import module_names
from merging.checkpoints.safetensors import SafetensorsSource
from merging.errors import CheckpointError
from merging.low_rank import LowRank, norm, shortened, shortened_product, summed

KINDS = ("llama", "llama_tied", "clip_vision", "vit", "vit_classifier", "gpt2", "t5", "bert", "dinov2")


@pytest.mark.parametrize("kind", KINDS)
def test_peft_makes_the_model_of_base_and_adapter(tiny: Any, tmp_path: Path, kind: str) -> None:
    model = tiny(kind)
    model.save_pretrained(tmp_path / "base")
    base = SafetensorsSource(tmp_path / "base")
    torch.manual_seed(1)
    merged = {}
    for name in base.names():
        tensor = base.read(name)
        change = torch.randn(tensor.shape)
        if tensor.ndim == 2:
            change = torch.randn(len(tensor), 3) @ torch.randn(3, tensor.shape[1])
        merged[name] = tensor + 0.1 * change if tensor.is_floating_point() else tensor

    sink = LoraSink(tmp_path / "out", base, outline_of(tmp_path / "base", base.names()), rank=3)
    with sink:
        for name, tensor in merged.items():
            half = slice(0, len(tensor) // 2), slice(len(tensor) // 2, None)
            for rows in reversed(half):
                sink.write(name, tensor[rows], rows)

    assert sink.summary()["relative_error"] < 1e-6
    assert sink.summary()["stored_whole"]
    read = open_adapter(tmp_path / "out", base, model)
    assert not read.notes
    found = loaded(model, tmp_path / "out")
    for name, place in module_names(model, base.names()).renamed.items():
        assert torch.allclose(found[place], merged[name], atol=1e-6), name
        assert torch.allclose(read.read(name).to(merged[name].dtype), merged[name], atol=1e-6), name


def test_a_parameter_outside_all_modules_is_refused_by_name(tiny: Any, tmp_path: Path) -> None:
    model = tiny("clip")
    model.save_pretrained(tmp_path / "base")
    base = SafetensorsSource(tmp_path / "base")

    sink = LoraSink(tmp_path / "out", base, outline_of(tmp_path / "base", base.names()), rank=3)
    for name in base.names():
        sink.write(name, base.read(name) + (1 if name == "logit_scale" else 0))

    with pytest.raises(CheckpointError, match=r"logit_scale: lies directly in the model"):
        sink.close()

    assert not (tmp_path / "out").exists()


def test_what_does_not_change_is_not_in_the_adapter(tiny: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path / "base")
    base = SafetensorsSource(tmp_path / "base")
    changed = "model.layers.1.self_attn.q_proj.weight"

    with LoraSink(tmp_path / "out", base, outline_of(tmp_path / "base", base.names()), rank=2) as sink:
        for name in base.names():
            sink.write(name, base.read(name).double() + (0.1 if name == changed else 0))

    assert len(load_file(tmp_path / "out" / "adapter_model.safetensors")) == 2
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.self_attn.q_proj"]
    assert config["r"] == config["lora_alpha"] == 1


def test_a_large_matrix_of_low_rank_is_shortened_without_a_whole_svd():
    torch.manual_seed(0)
    exact = torch.randn(1100, 5).double() @ torch.randn(5, 1050).double()
    noisy = exact + 1e-3 * torch.randn(1100, 1050).double()

    found, near = shortened(exact, 8), shortened(noisy, 5)

    assert found.rank == 5
    assert float((found.product() - exact).norm() / exact.norm()) < 1e-9
    best = torch.linalg.svdvals(noisy)[5:].norm()
    assert float((near.product() - noisy).norm()) == pytest.approx(float(best), rel=1e-3)


@pytest.mark.parametrize("rank", [None, 3])
def test_factors_are_shortened_as_their_product_is(rank: int | None) -> None:
    torch.manual_seed(0)
    terms = [LowRank(torch.randn(40, 2), torch.randn(2, 30), scale) for scale in (0.5, -2.0, 1.0)]
    whole = summed(terms, [1.0, 0.25, 3.0])
    dense = terms[0].product() + 0.25 * terms[1].product() + 3 * terms[2].product()

    found = shortened_product(whole, rank, noise=1e-5)

    assert torch.allclose(whole.product(), dense)
    assert found.rank == (rank or 6)
    assert torch.allclose(found.product(), shortened(dense, rank, noise=1e-5).product())
    assert norm([whole]) == pytest.approx(float(dense.norm()))
    lost = norm([whole, found._replace(scale=-1.0)])
    best = float(torch.linalg.svdvals(dense)[found.rank :].norm())
    assert lost == pytest.approx(best, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_change_written_as_factors_is_the_tensor_written_whole(
    tiny: Any, tmp_path: Path, kind: str
) -> None:
    model = tiny(kind)
    model.save_pretrained(tmp_path / "base")
    base = SafetensorsSource(tmp_path / "base")
    torch.manual_seed(1)
    outline = outline_of(tmp_path / "base", base.names())
    changes = {}
    for name in base.names():
        rows, columns = base.spec(name).shape[0], base.spec(name).elements // base.spec(name).shape[0]
        rank = 2 if base.read(name).is_floating_point() else 0
        changes[name] = LowRank(torch.randn(rows, rank), torch.randn(rank, columns), 0.1)

    with LoraSink(tmp_path / "factors", base, outline, rank=4) as by_factors:
        for name, change in changes.items():
            by_factors.write_change(name, change)
    with LoraSink(tmp_path / "whole", base, outline, rank=4) as by_tensor:
        for name, change in changes.items():
            start = base.read(name)
            moved = start.double() + change.product().view(start.shape) if change.rank else start
            by_tensor.write(name, moved)

    ours, theirs = (open_adapter(tmp_path / one, base, model) for one in ("factors", "whole"))
    assert by_factors.summary()["relative_error"] < 1e-6
    assert by_factors.summary()["stored_whole"] == by_tensor.summary()["stored_whole"]
    for name in base.names():
        assert torch.allclose(ours.read(name).double(), theirs.read(name).double(), atol=1e-6), name
