"""Fine-tuning: AdamW in small steps that are counted, not timed, so that a rerun gives the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_WARM_UP = 0.1
_LARGEST_GRADIENT = 1.0


def fine_tune(
    parameters: Iterable[nn.Parameter],
    loss: Callable[[], Tensor],
    *,
    learning_rate: float,
    steps: int,
    report: Callable[[int, int], None],
) -> None:
    """Write better values into the parameters. `loss()` is that of the next batch."""
    tuned = list(parameters)
    optimizer = torch.optim.AdamW(tuned, lr=learning_rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    for step in range(steps):
        report(step, steps)
        loss().backward()
        torch.nn.utils.clip_grad_norm_(tuned, _LARGEST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    report(steps, steps)


def fast_arithmetic() -> torch.autocast:
    """A context in which forwards are in bfloat16, where the processor multiplies in it itself; emulating it
    would be slower than float32."""
    # Older versions of torch cannot tell.
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    able = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return torch.autocast("cpu", torch.bfloat16, enabled=able)


def _rate(step: int, steps: int) -> float:
    """Share of the learning rate: a linear rise, then half a cosine to zero."""
    return min(1.0, (step + 1) / (_WARM_UP * steps)) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
