"""merge(): what it takes, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import merging
from merging.errors import CheckpointError, MergingError, RuleError, SpecError


@merging.strategy("test_median")
class Median(merging.TensorMerger):
    """Coordinate-wise median of the experts."""

    def combine(self, name, base_S, deltas_NS):
        return base_S + deltas_NS.median(dim=0).values


@merging.strategy("test_wrong_shape")
class WrongShape(merging.TensorMerger):
    """Gives all experts at once."""

    def combine(self, name, base_S, deltas_NS):
        return deltas_NS


@merging.strategy("test_raises")
class Raises(merging.TensorMerger):
    """Fails."""

    def combine(self, name, base_S, deltas_NS):
        raise ValueError("no such thing")


def experts(count: int = 3) -> dict[str, dict[str, torch.Tensor]]:
    return {f"e{i}": {"a": torch.randn(4, 3), "b": torch.randn(3)} for i in range(count)}


def test_a_rule_of_ones_own_is_usable_at_once():
    models = experts()

    merged = merging.merge("test_median", models["e0"], models)

    expected = torch.stack([model["a"] for model in models.values()]).median(dim=0).values
    torch.testing.assert_close(merged["a"], expected)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("test_wrong_shape", "test_wrong_shape.*shape .3, 4, 3.*a"),
        ("test_raises", 'test_raises.*"a".*no such thing'),
    ],
)
def test_a_broken_rule_is_named_with_its_tensor(rule, words):
    models = experts()

    with pytest.raises(RuleError, match=words):
        merging.merge(rule, models["e0"], models)


def test_all_misfits_are_listed_at_once():
    base = {"a": torch.zeros(4, 3), "b": torch.zeros(3)}
    models = {
        "short": {"a": torch.zeros(4, 3)},
        "wide": {"a": torch.zeros(4, 5), "b": torch.zeros(3), "c": torch.zeros(1)},
        "packed": {"a": torch.zeros(4, 3, dtype=torch.uint8), "b": torch.zeros(3)},
    }

    with pytest.raises(CheckpointError) as caught:
        merging.merge("average", base, models)

    lines = [str(problem) for problem in caught.value.problems]
    assert [line.split(":")[0] for line in lines] == [
        'expert "short"',
        'expert "wide"',
        'expert "wide"',
        'expert "packed"',
    ]
    assert "(4, 5)" in lines[1]
    assert "(4, 3)" in lines[1]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("tie", {}, 'did you mean "ties"'),
        ("ties", {"densty": 0.2}, 'densty.*[\\s\\S]*"density"'),
        ("ties", {"density": "0.2"}, "density.*expected"),
        ("average", {"weights": {"e9": 1}}, "weights.e9"),
        ("average", {"weights": {"e0": float("nan")}}, "finite"),
        ("test_median", {"weights": {"e0": 2.0}}, "does not use weights"),
    ],
)
def test_wrong_requests_are_explained(name, options, words):
    models = experts()

    with pytest.raises(SpecError, match=words):
        merging.merge(name, models["e0"], models, **options)


def test_modules_are_taken_and_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight
            self.inner = nn.Linear(4, 4)

    base, expert = Tied(), Tied()
    once = {name: tensor for name, tensor in base.state_dict().items() if name != "head.weight"}
    expert_once = {name: tensor for name, tensor in expert.state_dict().items() if name != "head.weight"}

    merged = merging.merge("ties", base, {"e": expert}, density=0.3)

    assert list(merged) == list(base.state_dict())
    assert torch.equal(merged["head.weight"], merged["embed.weight"])
    for name, tensor in merging.merge("ties", once, {"e": expert_once}, density=0.3).items():
        assert torch.equal(tensor, merged[name])


def test_untied_weights_are_merged_apart():
    shared = torch.zeros(5)
    base = {"a": shared, "b": shared}
    expert = {"a": torch.ones(5), "b": torch.full((5,), 2.0)}

    merged = merging.merge("average", base, {"e": expert})

    assert merged["b"].tolist() == [2.0] * 5


def test_no_experts_are_refused():
    with pytest.raises(SpecError, match="no experts"):
        merging.merge("average", {"a": torch.zeros(1)}, {})


def test_every_error_is_a_merging_error():
    with pytest.raises(MergingError, match="expected a mapping"):
        merging.merge("average", {"a": torch.zeros(1)}, {"e": 3})
