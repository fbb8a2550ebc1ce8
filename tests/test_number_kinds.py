"""Every kind of number that a tensor can have: merged, left as the base's, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import merging
from merging.errors import CheckpointError
from merging.pipeline import Pipeline

MERGED = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
KEPT = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
KEPT += [getattr(torch, name) for name in ("uint16", "uint32", "uint64")]
NAMED = [name for name in dir(torch) if name.startswith(("float8_", "float4_"))]
COMPLEX = [torch.complex64, torch.complex128]


def models(value: Tensor, other: Tensor, name: str = "odd") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A base and an expert that has another value of one tensor."""
    return {"w": torch.zeros(4), name: value}, {"a": {"w": torch.ones(4), name: other}}


@pytest.mark.parametrize("dtype", MERGED, ids=str)
def test_real_numbers_are_merged_and_stored_as_they_were(dtype: torch.dtype) -> None:
    base, experts = models(torch.zeros(4, dtype=dtype), torch.full((4,), 2.0, dtype=dtype))

    merged = merging.merge("task_arithmetic", base, experts, scale=0.5)

    assert merged["odd"].dtype == dtype
    assert merged["odd"].tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", KEPT, ids=str)
def test_integers_and_booleans_are_the_bases(dtype: torch.dtype) -> None:
    base, experts = models(torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype))

    merged = merging.merge("average", base, experts)

    assert torch.equal(merged["odd"], base["odd"])
    assert merged["w"].tolist() == [1.0] * 4


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("who", ["base", "expert"])
def test_eight_and_four_bits_are_refused_by_name(name: str, who: str) -> None:
    odd = torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name))
    base, experts = models(*((odd, torch.zeros(4)) if who == "base" else (torch.zeros(4), odd)))

    with pytest.raises(CheckpointError, match=rf'quantised.*"odd" is stored as {name}'):
        merging.merge("average", base, experts)


def test_packed_integers_are_refused_as_those_of_a_folder_are() -> None:
    base, experts = models(torch.zeros(4, dtype=torch.int8), torch.zeros(4, dtype=torch.int8), "fc.weight")

    with pytest.raises(CheckpointError, match=r'base is quantised.*"fc\.weight" is stored as int8'):
        merging.merge("average", base, experts)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_numbers_that_differ_are_refused_by_name(dtype: torch.dtype) -> None:
    base, experts = models(torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype))

    with pytest.raises(
        CheckpointError, match=r'(?s)expert "a": odd: complex.* in the base, with other values'
    ):
        merging.merge("average", base, experts)

    experts["a"]["odd"] = base["odd"].clone()
    merged = merging.merge("average", base, experts)
    assert torch.equal(merged["odd"], base["odd"])
    assert merged["w"].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("base", "expert", "words"),
    [
        ({}, {"odd": torch.zeros(4).cfloat()}, 'expert "a": odd: not in the base'),
        ({"odd": torch.zeros(4).cfloat()}, {}, 'expert "a": odd: missing'),
        ({"odd": torch.zeros(4)}, {"odd": torch.zeros(4).cfloat()}, "complex64, which cannot be merged with"),
        ({"odd": torch.zeros(4).cfloat()}, {"odd": torch.zeros(4)}, "float32, which cannot be merged with"),
        ({"odd": torch.zeros(4).cfloat()}, {"odd": torch.zeros(4).int()}, "with other values here"),
    ],
    ids=["extra", "missing", "for real ones", "real for them", "integers for them"],
)
def test_complex_numbers_are_never_dropped(
    base: dict[str, Tensor], expert: dict[str, Tensor], words: str
) -> None:
    whole = {"w": torch.zeros(4)}

    with pytest.raises(CheckpointError) as caught:
        merging.merge("average", {**whole, **base}, {"a": {**whole, **expert}})

    assert words in str(caught.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda: torch.zeros(4, device="meta"), "odd: has no values: it is on the meta device"),
        (lambda: torch.zeros(4, 4).to_sparse(), "odd: is no dense tensor, but sparse_coo"),
        (
            lambda: torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8),
            "odd: is quantised, as qint8",
        ),
        (lambda: nn.LazyLinear(3).weight, "odd: has no shape yet"),
        (lambda: [1.0, 2.0], "odd: found a list, expected a tensor"),
        (lambda: None, "odd: found None, expected a tensor"),
    ],
    ids=["meta", "sparse", "quantised", "lazy", "list", "nothing"],
)
def test_what_is_no_tensor_of_values_is_refused_by_name(odd: Callable[[], Any], words: str) -> None:
    base, experts = models(torch.zeros(4), odd())

    with pytest.raises(CheckpointError) as caught:
        merging.merge("average", base, experts)

    assert words in str(caught.value)


@pytest.mark.parametrize("difference", ["none", "values", "missing", "extra", "real"])
def test_a_run_keeps_equal_complex_numbers_and_refuses_others(tmp_path: Path, difference: str) -> None:
    turns = torch.polar(torch.ones(6), torch.arange(6.0))
    base, expert = {"w": torch.randn(8, 4)}, {"w": torch.randn(8, 4) + 4}
    base["w"] = expert["w"] + 0.01
    if difference != "extra":
        base["turns"] = turns
    if difference != "missing":
        expert["turns"] = {"values": turns * 2, "real": turns.real.clone()}.get(difference, turns)
    for name, tensors in {"base": base, "a": expert}.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    spec = {"base": str(tmp_path / "base"), "experts": {"a": str(tmp_path / "a")}, "merge": "average"}

    if difference == "none":
        Pipeline.from_spec(spec).run(tmp_path / "out")
        merged = load_file(tmp_path / "out" / "merged" / "model.safetensors")
        assert torch.equal(merged["turns"], turns)
        assert torch.equal(merged["w"], expert["w"])
        return
    with pytest.raises(CheckpointError, match="turns"):
        Pipeline.from_spec(spec).run(tmp_path / "out")
    assert not (tmp_path / "out" / "merged").exists()
