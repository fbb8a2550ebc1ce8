"""Compiled inner loops (kernels.c), where the installation has them; where not, the callers' torch code runs.

Both give the same bits. MERGING_NATIVE=0 in the environment leaves the compiled ones out.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

_POINTER, _INT64, _INT32, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double
_UINT64 = ctypes.c_uint64
_FUNCTIONS = {  # arguments, result
    "merging_weighted_sum": ([_POINTER, _INT64, _INT64, _POINTER, _DOUBLE, _INT64, _POINTER], None),
    "merging_to_bfloat16": ([_POINTER, _INT64, _POINTER], _INT32),
    "merging_near": ([_POINTER, _INT64, _INT32, _INT32, _POINTER, _POINTER], _INT64),
    "merging_count": ([_POINTER, _INT64, _INT32, _POINTER], None),
    "merging_ties": (
        [
            *(_POINTER, _INT64, _INT64, _POINTER, _POINTER, _DOUBLE),
            *(_INT32, _DOUBLE, _INT64, _POINTER),
        ],
        _INT64,
    ),
    "merging_balance": ([_POINTER, _INT64, _INT64, _POINTER, _POINTER, _INT64], _INT64),
    "merging_products": ([_POINTER, _INT64, _INT64, _INT64, _POINTER], None),
    "merging_add_scaled": ([_POINTER, _INT64, _POINTER, _INT64, _DOUBLE, _INT64, _INT64], None),
    "merging_keep": ([_POINTER, _POINTER, _DOUBLE, _INT64], None),
    "merging_from_bfloat16": ([_POINTER, _POINTER, _INT64, _POINTER], None),
    **{f"merging_not_finite_{bits}": ([_POINTER, _UINT64, _INT64], _INT64) for bits in (16, 32, 64)},
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None."""
    if os.environ.get("MERGING_NATIVE") == "0":
        return None
    here = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        file = here / f"_kernels{suffix}"
        if file.is_file():
            try:
                found = ctypes.CDLL(str(file))
                for name, (arguments, result) in _FUNCTIONS.items():
                    function = getattr(found, name)
                    function.argtypes, function.restype = arguments, result
            except (OSError, AttributeError):  # of another machine, or of another version
                return None
            return found
    return None


def stacked(tensors_NS: Tensor) -> bool:
    """Whether these are float64 in memory, each of one piece: what the functions below take."""
    return (
        library() is not None
        and tensors_NS.dtype == torch.float64
        and tensors_NS.device.type == "cpu"
        and len(tensors_NS) > 0
        and tensors_NS[0].is_contiguous()
    )


def weighted_sum(tensors_NS: Tensor, weights: list[float], divisor: float) -> Tensor:
    total_S = torch.empty(tensors_NS.shape[1:], dtype=torch.float64)
    _loaded().merging_weighted_sum(
        tensors_NS.data_ptr(),
        tensors_NS.stride(0),
        len(tensors_NS),
        (_DOUBLE * len(weights))(*weights),
        divisor,
        total_S.numel(),
        total_S.data_ptr(),
    )
    return total_S


def to_bfloat16(tensor: Tensor) -> tuple[Tensor, int]:
    """A float64 tensor correctly rounded, and the largest magnitude of the result, as bits."""
    tensor = tensor.contiguous()
    result = torch.empty(tensor.shape, dtype=torch.bfloat16)
    largest = _loaded().merging_to_bfloat16(tensor.data_ptr(), tensor.numel(), result.data_ptr())
    return result, largest


def from_bfloat16_(target_S: Tensor, stored_S: Tensor, less_S: Tensor | None) -> None:
    """Fill a float64 tensor from a bfloat16 one, less another float64 one; all of one piece."""
    less = None if less_S is None else less_S.data_ptr()
    _loaded().merging_from_bfloat16(stored_S.data_ptr(), less, stored_S.numel(), target_S.data_ptr())


def near(tensor_S: Tensor, low: int, window: int) -> tuple[int, Tensor]:
    """How many magnitudes (as float32 bits) lie `window` or more above `low`; how far above it those between
    lie (int32)."""
    found = torch.empty(tensor_S.numel(), dtype=torch.int32)
    above = ctypes.c_int64(0)
    count = _loaded().merging_near(
        tensor_S.data_ptr(), tensor_S.numel(), low, window, ctypes.byref(above), found.data_ptr()
    )
    return above.value, found[:count].clone()


def count_(counts: Tensor, tensor_S: Tensor, high: int | None) -> None:
    """Add to `counts` (int64) how many magnitudes (as float32 bits) have which upper 15 bits; or, of those
    whose upper 15 are `high`, which lower 16."""
    _loaded().merging_count(
        tensor_S.data_ptr(), tensor_S.numel(), -1 if high is None else high, counts.data_ptr()
    )


def ties(
    deltas_NS: Tensor, thresholds_N: Tensor, weights_N: Tensor, *, mean: bool, sign_of_zero: int
) -> tuple[Tensor, int]:
    """Trimmed by magnitude bits (int32), weighed, elected by mass, merged; and how many entries cancelled."""
    merged_S = torch.empty(deltas_NS.shape[1:], dtype=torch.float64)
    thresholds_N, weights_N = thresholds_N.contiguous(), weights_N.to(torch.float64).contiguous()
    cancelled = _loaded().merging_ties(
        deltas_NS.data_ptr(),
        deltas_NS.stride(0),
        len(deltas_NS),
        thresholds_N.data_ptr(),
        weights_N.data_ptr(),
        float(weights_N.min()),
        int(mean),
        sign_of_zero,
        merged_S.numel(),
        merged_S.data_ptr(),
    )
    return merged_S, cancelled


def balance(deltas_NS: Tensor, thresholds_N: Tensor, weights_N: Tensor) -> int:
    """The sum of the signs that `ties` elects, 0 where entries cancel."""
    thresholds_N, weights_N = thresholds_N.contiguous(), weights_N.to(torch.float64).contiguous()
    return _loaded().merging_balance(
        deltas_NS.data_ptr(),
        deltas_NS.stride(0),
        len(deltas_NS),
        thresholds_N.data_ptr(),
        weights_N.data_ptr(),
        deltas_NS[0].numel(),
    )


def products(models_MS: Tensor) -> Tensor:
    """The inner products of each with each (M M)."""
    count = len(models_MS)
    found = torch.zeros((count, count), dtype=torch.float64)
    _loaded().merging_products(
        models_MS.data_ptr(), models_MS.stride(0), count, models_MS[0].numel(), found.data_ptr()
    )
    return found


def keep_(deltas_NS: Tensor, keep_NS: Tensor, divisor: float) -> None:
    """Where the mask is set, the entry over `divisor`; 0 elsewhere. In place."""
    keep_NS = keep_NS.contiguous()
    for delta_S, keep_S in zip(deltas_NS, keep_NS, strict=True):
        _loaded().merging_keep(delta_S.data_ptr(), keep_S.data_ptr(), divisor, delta_S.numel())


def add_scaled_(total: Tensor, part: Tensor, scale: float) -> bool:
    """total += scale · part, float64 and float32 matrices whose rows are of one piece; False for others."""
    fits = (
        library() is not None
        and (total.dtype, part.dtype) == (torch.float64, torch.float32)
        and total.device.type == part.device.type == "cpu"
        and total.stride(1) == part.stride(1) == 1
    )
    if fits:
        count = torch.get_num_threads() if total.numel() >= _WORTH_THREADS else 1
        parts = list(zip(total.tensor_split(count), part.tensor_split(count), strict=True))
        others = [Thread(target=_add_scaled_rows_, args=(*rows, scale)) for rows in parts[1:]]
        for thread in others:
            thread.start()
        _add_scaled_rows_(*parts[0], scale)
        for thread in others:
            thread.join()
    return fits


_WORTH_THREADS = 1 << 19  # entries


def _add_scaled_rows_(total: Tensor, part: Tensor, scale: float) -> None:
    rows, columns = total.shape
    _loaded().merging_add_scaled(
        *(total.data_ptr(), total.stride(0), part.data_ptr(), part.stride(0)), *(scale, rows, columns)
    )


def not_finite(data: Tensor, *, width: int, ones: int) -> int | None:
    """How many entries of `width` bytes have all bits of `ones`; None where there is no function for them.
    `data`: bytes of one piece."""
    if library() is None or width not in (2, 4, 8):
        return None
    count: int = getattr(_loaded(), f"merging_not_finite_{8 * width}")(
        data.data_ptr(), ones, data.numel() // width
    )
    return count


def _loaded() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise RuntimeError("the compiled functions are not installed")
    return found
