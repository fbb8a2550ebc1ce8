"""LOT: one linear and one norm, from given inputs; task vectors are weights around a base of zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from golden_adapters.expressing import NotExpressible, refuse_unknown, resolve
from merging.moments import Moments, NormMoments
from merging.normal_equations import NormalEquations, NormEquations
from merging.strategies.lot import Lot


def lot(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    params, given = case["params"], resolve(case["inputs"], tensors)
    refuse_unknown(params, "inverse", "x_layout", "weight_layout")
    known = {"inverse": "pinv(hermitian)", "x_layout": "[tokens, features]", "weight_layout": "[out, in]"}
    for name, value in params.items():
        if value != known[name]:
            raise NotExpressible(f"{name} is {known[name]} here, not {value}")
    rule = Lot()
    return {
        "linear_task_vector": linear(rule, given["task_vectors"], given["inputs"]),
        "scale_task_vector": scale(rule, given["scale_task_vectors"], given["normalised_inputs"]),
        "shift_task_vector": torch.stack(given["shift_task_vectors"]).double().mean(0),
    }


def linear(rule: Lot, weights: list[Tensor], inputs: list[Tensor]) -> Tensor:
    equations = NormalEquations(weights[0].shape[1], weights[0].shape[0])
    for weight_OD, x_TD in zip(weights, inputs, strict=True):
        moments = Moments(weight_OD.shape[1])
        moments.add(x_TD.double())
        rule.add(equations, weight_OD.double(), moments)
    zero_OD = torch.zeros_like(weights[0])
    return rule.solve(equations, zero_OD, zero_OD)


def scale(rule: Lot, scales: list[Tensor], inputs: list[Tensor]) -> Tensor:
    equations = NormEquations(len(scales[0]), shift=True)
    for scale_D, z_TD in zip(scales, inputs, strict=True):
        moments = NormMoments(len(scale_D))
        moments.add(z_TD.double())
        rule.add_norm(equations, scale_D, None, moments)
    zero_D = torch.zeros_like(scales[0])
    return rule.solve_norm(equations, (zero_D, zero_D), (zero_D, zero_D))[0]


ADAPTERS = {"lot": lot}
