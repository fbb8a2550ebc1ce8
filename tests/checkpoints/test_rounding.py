"""Values are rounded once, to nearest even, from whatever they were computed in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from merging.checkpoints.rounding import rounded
from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import StateDictSource
from merging.errors import CheckpointError, NumericalError


def nearest_even(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The oracle: of all numbers of the 16-bit type, the nearest; of two, the one whose last bit is 0."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    every = every[torch.isfinite(every)]
    wide = every.double().numpy()
    order = np.argsort(wide, kind="stable")
    wide, bits = wide[order], every.view(torch.int16).numpy()[order]
    found = []
    for value in values.tolist():
        distance = np.abs(wide - value)
        nearest = np.flatnonzero(distance == distance.min())
        even = [index for index in nearest if bits[index] & 1 == 0]
        found.append(bits[(even or list(nearest))[0]])
    return torch.tensor(found, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float64_is_rounded_once(dtype):
    torch.manual_seed(0)
    some = torch.randn(200, dtype=torch.float64)
    ulp = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    ties = 1 + ulp * torch.tensor([1.0, 3.0, 5.0, -1.0], dtype=torch.float64)
    close = torch.cat([ties + 2.0**-40, ties - 2.0**-40, -ties - 2.0**-45])  # where rounding twice goes wrong
    small = torch.tensor([3.1e-8, 2.0**-24 * 1.5 + 2.0**-60, 1e-40, 0.0], dtype=torch.float64)
    tiny = 2.0 ** torch.tensor([-126.0, -133.0, -134.0, -140.0], dtype=torch.float64)  # subnormal in bfloat16
    small = torch.cat([small, tiny, tiny * (1 + 2.0**-40), tiny * (1 - 2.0**-40), -tiny * 1.5])
    values = torch.cat([some, ties, close, small])
    assert torch.equal(rounded(values, dtype, name="w"), nearest_even(values, dtype))
    assert not torch.equal(close.to(dtype), nearest_even(close, dtype))  # torch alone rounds twice


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float32_is_rounded_as_torch_does(dtype):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded(values, dtype, name="w"), values.to(dtype))


def test_large_tensors_and_views_are_rounded_alike():
    values = torch.randn(3, 2000, 1000, dtype=torch.float64).transpose(0, 2)
    found = rounded(values, torch.bfloat16, name="w")
    assert found.shape == values.shape
    assert torch.equal(found[-1], rounded(values[-1].contiguous(), torch.bfloat16, name="w"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite_stop_with_name_and_count(bad, dtype):
    values = torch.ones(10, dtype=torch.float64)
    values[3] = bad
    with pytest.raises(
        NumericalError, match='"q_proj" would be written with 1 of 10 values that are not finite'
    ):
        rounded(values, dtype, name="q_proj")
    found = rounded(values, dtype, name="q_proj", allow_nonfinite=True)
    assert torch.equal(found.isnan(), values.isnan())
    assert torch.equal(found.isinf(), values.isinf())


def test_values_too_large_for_the_stored_dtype_say_so():
    with pytest.raises(NumericalError, match='"w" has values up to 70000, more than float16 can hold'):
        rounded(torch.tensor([70000.0]), torch.float16, name="w")
    assert rounded(torch.tensor([70000.0]), torch.bfloat16, name="w") == 70144


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_and_bools_are_not_converted(dtype):
    assert rounded(torch.ones(2, dtype=dtype), dtype, name="n").dtype == dtype
    with pytest.raises(CheckpointError, match=r'"n" is stored as .* must not be written as float32'):
        rounded(torch.ones(2), dtype, name="n")


def test_the_sink_in_memory_rounds_in_the_same_way():
    base = {"w": torch.zeros(2, 2, dtype=torch.bfloat16), "n": torch.tensor(3)}
    with StateDictSink(StateDictSource(base)) as sink:
        sink.write("w", torch.full((1, 2), 1 + 2.0**-8 + 2.0**-40, dtype=torch.float64), slice(0, 1))
        sink.write("w", torch.ones(1, 2), slice(1, 2))
        sink.write("n", torch.tensor(4))
    assert sink.tensors["w"].tolist() == [[1.0078125, 1.0078125], [1.0, 1.0]]
    assert sink.tensors["n"] == 4
