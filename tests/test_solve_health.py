"""Systems that say too little: what the solution keeps, how large it may become, and what the report says."""

from __future__ import annotations

import pytest
import torch
from tiny_models import expert_of, made, opened, same_data

from merging.checkpoints.sink import StateDictSink
from merging.components import strategies
from merging.errors import NumericalError
from merging.measuring import Measure, TokenWeights
from merging.moments import Moments
from merging.normal_equations import NormalEquations
from merging.report.solver import SolverRow
from merging.tracer import Feed, blocks_of

FEATURES, OUTPUTS = 24, 6


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def system(tokens: int, *, dead: int = 0) -> tuple[NormalEquations, torch.Tensor]:
    """Two tasks on so many tokens each, the first features always 0; the experts' weights."""
    equations = NormalEquations(FEATURES, OUTPUTS)
    weights = drawn(2, OUTPUTS, FEATURES, seed=1)
    for task, weight_OD in enumerate(weights):
        x_TD = drawn(tokens, FEATURES, seed=10 + task)
        x_TD[:, :dead] = 0.0
        equations.add(weight_OD, x_TD.T @ x_TD / tokens, tokens=tokens)
    return equations, weights


@pytest.mark.parametrize("tokens", [1, 3, 11])
@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_fewer_tokens_than_features_leave_a_solution_of_bounded_norm(tokens: int, ridge: float) -> None:
    equations, weights = system(tokens)
    anchor_OD = weights.mean(0)

    found_OD = equations.solve(ridge=ridge, anchor_OD=anchor_OD)

    assert equations.health is not None
    assert equations.health.short_of_tokens == (2 * tokens < FEATURES)
    assert torch.isfinite(found_OD).all()
    largest = max(float(weight.norm()) for weight in weights)
    assert float(found_OD.norm()) < 3 * largest


def test_directions_without_tokens_keep_the_anchor_and_the_rank_says_how_many_have_some() -> None:
    equations, weights = system(4)
    anchor_OD = weights.mean(0)

    found_OD = equations.solve(anchor_OD=anchor_OD)

    assert equations.health is not None
    assert equations.health.rank == 8
    assert equations.health.fallback == "pseudo-inverse without 16 of 24 directions"
    seen = torch.linalg.svd(equations.lhs_DD).Vh[:8]
    blind_DD = torch.eye(FEATURES, dtype=torch.float64) - seen.T @ seen
    assert torch.allclose(found_OD @ blind_DD, anchor_OD @ blind_DD, atol=1e-8)


@pytest.mark.parametrize("damping", [0.0, 1e-6])
def test_dead_features_keep_the_anchor(damping: float) -> None:
    equations, weights = system(200, dead=5)
    anchor_OD = weights.mean(0)

    found_OD = equations.solve(ridge=1e-3, anchor_OD=anchor_OD, damping=damping)

    assert torch.allclose(found_OD[:, :5], anchor_OD[:, :5], rtol=2e-3)
    assert equations.health is not None
    assert equations.health.rank == FEATURES


def test_damping_is_told_relative_to_the_mean_of_the_diagonal() -> None:
    equations, weights = system(200)
    mean = float(equations.lhs_DD.diagonal().mean())

    equations.solve(anchor_OD=weights[0], damping=0.01)

    assert equations.health is not None
    assert equations.health.damping == pytest.approx(0.01 / mean)


def test_every_solve_of_a_run_tells_tokens_rank_condition_and_damping() -> None:
    backbone, model, batches = made("clip")
    experts = {"a": expert_of(model, 1), "b": expert_of(model, 2)}
    models = opened(model, experts, backbone)

    notes = strategies.get("regmean")().merge(
        models, same_data(experts, *batches), StateDictSink(models.base)
    )

    assert notes["health"]
    for row in notes["health"].values():
        found = SolverRow(module="", block="", **row)
        assert found.tokens in (170, 10)  # pictures and their patches; in the last block, their first tokens
        assert 0 < found.rank <= found.features
        assert found.condition >= 1
        assert found.damping >= 0


def test_an_input_that_is_not_finite_names_its_module() -> None:
    backbone, model, batches = made("clip")
    block = blocks_of(model, backbone.stacks(model))[0]
    feed = Feed(("mlp.fc1",), 32, (3, 17))
    weights = TokenWeights(backbone, batches[0], block, False)
    measure = Measure(block, {feed: Moments(32)}, {}, {}, weights)

    with pytest.raises(NumericalError, match=r'the input of "encoder\.layers\.0\.mlp\.fc1", is not finite'):
        measure.observers()["mlp.fc1"](torch.full((3, 17, 32), float("nan")))
