"""Mixtures of experts: walked, merged and calibrated expert by expert, from the tokens that reach each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from routed_models import ROUTED, near, routed_model, stored
from tiny_models import Given, opened, same_data, tokens
from torch import Tensor, nn

from merging.averaging import AverageSource
from merging.backbones.routed_experts import RoutedExperts, following
from merging.calibrators.featcal import FeatCal
from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import StateDictSource
from merging.contracts.merger import Merger
from merging.contracts.models import Models
from merging.data.task import CalibrationData
from merging.fates import UNSEEN
from merging.records import Records
from merging.strategies.average import Average
from merging.strategies.chain_of_merges import ChainOfMerges
from merging.strategies.lot import Lot
from merging.strategies.regmean import RegMean
from merging.strategies.regmean_plus_plus import RegMeanPlusPlus
from merging.streaming import StreamedModel, load_model
from merging.tracer import BlockTracer, blocks_of

RULES = (RegMean, RegMeanPlusPlus, ChainOfMerges, Lot, FeatCal)
BATCHES = [tokens(4, 11), tokens(3, 6, seed=1)]
MIXTRAL = "model.layers.{}.block_sparse_moe"


def made_by(rule: Any, models: Models, data: CalibrationData) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors that a rule makes, and its notes; a calibrator starts from the average."""
    sink = StateDictSink(models.base)
    with sink:
        if isinstance(rule, Merger):
            notes = rule.merge(models, data, sink)
        else:
            notes = rule.calibrate(AverageSource(models), models, data, sink)
    return sink.tensors, dict(notes)


def two_experts(name: str) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], Models]:
    backbone, model = routed_model(name)
    base = stored(model)
    experts = {"a": near(base, 1), "b": near(base, 2)}
    return base, experts, opened(base, experts, backbone)


@pytest.mark.parametrize("name", ROUTED)
def test_experts_as_linears_compute_what_the_model_computes(name: str) -> None:
    backbone, model = routed_model(name)

    ours = load_model(backbone, StateDictSource(stored(model)))

    assert sum(isinstance(module, RoutedExperts) for module in ours.modules()) == 2
    with torch.no_grad():
        for batch in BATCHES:
            found, expected = (one(**batch, use_cache=False).logits for one in (ours, model))
            assert torch.allclose(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ROUTED)
def test_block_by_block_equals_the_plain_forward(name: str) -> None:
    backbone, model = routed_model(name)
    source = StateDictSource(stored(model))
    streamed = StreamedModel(backbone, source.names())
    calls = [backbone.forward_kwargs(batch) for batch in BATCHES]
    blocks = blocks_of(streamed.module, backbone.stacks(streamed.module))
    tracer = BlockTracer(streamed.module, blocks, calls, Records())

    streamed.attach(source)
    streamed.load(without=[block.name for block in blocks])
    for index, block in enumerate(blocks):
        streamed.load(block.name)
        for batch in range(len(calls)):
            tracer.record(index, batch, tracer.run(index, tracer.call(index, batch), {}))
        streamed.release(block.name)

    whole = load_model(backbone, source)
    with torch.no_grad():
        for batch, call in enumerate(calls):
            assert torch.equal(tracer.finish(batch).logits, whole(**call).logits)
            assert torch.allclose(tracer.finish(batch).logits, model(**call).logits, atol=1e-6, rtol=1e-6)


def test_router_shared_experts_and_each_routed_expert_have_feeds_of_their_own() -> None:
    backbone, model = routed_model("qwen2_moe")
    ours = load_model(backbone, StateDictSource(stored(model)))
    blocks = blocks_of(ours, backbone.stacks(ours))
    tracer = BlockTracer(ours, blocks, [backbone.forward_kwargs(BATCHES[0])], Records())

    feeds = {frozenset(feed.linears) for feed in tracer.layout(0, 0).feeds}

    shared = {"mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert_gate"}
    assert frozenset(shared | {"mlp.gate"}) in feeds
    for expert in range(4):
        place = f"mlp.experts.{expert}"
        assert {
            frozenset({f"{place}.gate_proj", f"{place}.up_proj"}),
            frozenset({f"{place}.down_proj"}),
        } <= feeds


@pytest.mark.parametrize("name", ROUTED)
def test_every_rule_solves_experts_and_routers_and_reports_every_tensor_once(name: str) -> None:
    base, _, models = two_experts(name)

    for rule in RULES:
        result, notes = made_by(rule(), models, same_data(models.experts, *BATCHES))

        assert sorted([*notes["solved"], *notes["left"]]) == sorted(base)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in result.values())
        inside = {why for name, why in notes["left"].items() if ".layers." in name}
        assert inside <= {UNSEEN, "this method leaves norms", "this method leaves biases"}


def test_regmean_of_a_routed_expert_takes_the_tokens_that_reach_it() -> None:
    """Against Grams of the inputs that the experts' own forward selects, padding left out."""
    _, experts, models = two_experts("mixtral")
    stem = f"{MIXTRAL.format(0)}.experts.2"

    result, _ = made_by(RegMean(shrink=0.9), models, same_data(experts, *BATCHES))

    grams = {leaf: [] for leaf in ("w1", "w2")}
    for state in experts.values():
        model = load_model(models.backbone, StateDictSource(state))
        mine = model.get_submodule("model.layers.0.mlp.experts")
        seen: dict[str, list[Tensor]] = {"w1": [], "w2": []}
        for leaf, inputs in seen.items():
            mine.get_submodule(f"2.{leaf}").register_forward_pre_hook(lambda _, x, to=inputs: to.append(x[0]))
        for batch in BATCHES:
            with torch.no_grad():
                model(**batch, use_cache=False)
            real = batch["attention_mask"].reshape(-1)[mine.routes.tokens[2]] != 0
            for inputs in seen.values():
                inputs[-1] = inputs[-1][real]
        for leaf, inputs in seen.items():
            x_TD = torch.cat(inputs).double()
            gram_DD = x_TD.T @ x_TD / len(x_TD)
            grams[leaf].append(0.9 * gram_DD + 0.1 * gram_DD.diagonal().diag())
    for leaf, gram in grams.items():
        weights = [state[f"{stem}.{leaf}.weight"].double() for state in experts.values()]
        wanted = sum(w @ g for w, g in zip(weights, gram, strict=True)) @ torch.linalg.inv(sum(gram))
        assert torch.allclose(result[f"{stem}.{leaf}.weight"].double(), wanted, atol=1e-4)


def starved(state: Mapping[str, Tensor], expert: int = 3) -> dict[str, Tensor]:
    """A feature that is large in all tokens, and routers in which it speaks against one expert."""
    state = {name: tensor.clone() for name, tensor in state.items()}
    state["model.embed_tokens.weight"][:, 0] = 30.0
    for name, weight_OD in state.items():
        if name.endswith("block_sparse_moe.gate.weight"):
            weight_OD[:, 0] = 0.0
            weight_OD[expert] = 0.0
            weight_OD[expert, 0] = -50.0
    return state


@pytest.mark.parametrize("rule", RULES)
def test_an_expert_without_tokens_keeps_the_average_and_is_listed_with_n_0(rule: Any) -> None:
    backbone, model = routed_model("mixtral")
    base = starved(stored(model))
    experts = {"a": starved(near(base, 1)), "b": starved(near(base, 2))}
    models = opened(base, experts, backbone)
    average, _ = made_by(Average(), models, same_data(experts, *BATCHES))

    result, notes = made_by(rule(), models, same_data(experts, *BATCHES))

    for layer in range(2):
        for leaf in ("w1", "w2", "w3"):
            name = f"{MIXTRAL.format(layer)}.experts.3.{leaf}.weight"
            assert torch.equal(result[name], average[name])
            assert notes["left"][name] == UNSEEN
    assert f"{MIXTRAL.format(0)}.experts.0.w1.weight" in notes["solved"]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.values())


def test_an_expert_that_only_one_task_reaches_is_solved_for_that_task() -> None:
    backbone, model = routed_model("mixtral")
    base = stored(model)
    experts = {"a": near(base, 1), "b": starved(near(base, 2))}
    models = opened(base, experts, backbone)
    name = f"{MIXTRAL.format(0)}.experts.3.w1.weight"

    result, _ = made_by(RegMean(shrink=1.0), models, same_data(experts, tokens(40, 12)))

    assert torch.allclose(result[name], experts["a"][name], atol=1e-3)


def test_featcal_with_one_expert_and_a_vanishing_ridge_recovers_routed_experts_and_router() -> None:
    backbone, model = routed_model("mixtral")
    base = stored(model)
    expert = near(base, 1)
    models = opened(base, {"a": expert}, backbone)
    rule = FeatCal(ridge=1e-12, interpolation=0.0, anchor=1.0)
    rule.precision = "float64"
    sink = StateDictSink(models.base)
    middle = {name: (tensor + expert[name]) / 2 for name, tensor in base.items()}

    with sink:
        rule.calibrate(StateDictSource(middle), models, CalibrationData({"a": Given(tokens(150, 20))}), sink)

    linears = [name for name in base if "block_sparse_moe" in name]
    for name in linears:
        missing = float((sink.tensors[name] - expert[name]).norm() / (base[name] - expert[name]).norm())
        assert missing < 0.1, f"{name}: {missing:.3f} of the task vector is missing"


def test_targets_of_a_routed_expert_are_the_expert_models_at_the_tokens_that_the_student_sends() -> None:
    """What leads in and what leads out, though the two models route otherwise."""
    backbone, _ = routed_model("mixtral")
    student, expert = (
        load_model(backbone, StateDictSource(stored(routed_model("mixtral", seed)[1]))) for seed in (0, 1)
    )
    ours, theirs = (one.get_submodule("model.layers.0.mlp.experts") for one in (student, expert))
    x_ND, y_ND = (torch.randn(9, 32, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6))
    mine, other = torch.tensor([[0, 1]] * 5 + [[2, 0]] * 4), torch.tensor([[1, 3]] * 9)
    half = torch.full((9, 2), 0.5)
    with torch.no_grad():
        plain = theirs(y_ND, other, half)
        ours(x_ND, mine, half)
        seen: dict[str, Tensor] = {}
        for leaf in ("w1", "w2"):
            theirs.get_submodule(f"2.{leaf}").register_forward_pre_hook(
                lambda _, x, leaf=leaf: seen.setdefault(leaf, x[0])
            )
        with following(expert, student):
            led = theirs(y_ND, other, half)

    assert torch.equal(led, plain)
    assert torch.equal(seen["w1"], y_ND[5:])
    inner = torch.nn.functional.silu(theirs.get_submodule("2.w1")(y_ND[5:])) * theirs.get_submodule("2.w3")(
        y_ND[5:]
    )
    assert torch.allclose(seen["w2"], inner)


def test_a_chain_passes_once_over_all_experts_and_not_once_per_expert() -> None:
    _, experts, models = two_experts("mixtral")
    units: list[int] = []
    sink = StateDictSink(models.base)

    with sink:
        ChainOfMerges().merge(
            models, same_data(experts, *BATCHES), sink, progress=lambda _, done, total: units.append(total)
        )

    assert units[-1] == 2 * 2 * 5  # blocks, tasks; q k v, o, the router, all w1 and w3, all w2


@pytest.mark.parametrize("rule", [RegMean, FeatCal])
def test_padding_is_no_token_of_any_expert(rule: Any) -> None:
    _, experts, models = two_experts("mixtral")
    lengths = [9, 5, 7, 3]
    sentences = [torch.randint(3, 60, (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths]
    alone = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in sentences]
    ids, mask = torch.zeros(4, 9, dtype=torch.long), torch.zeros(4, 9, dtype=torch.long)
    for row, sentence in enumerate(sentences):
        ids[row, : sentence.shape[1]], mask[row, : sentence.shape[1]] = sentence[0], 1

    one_by_one, _ = made_by(rule(), models, same_data(experts, *alone))
    together, _ = made_by(rule(), models, same_data(experts, {"input_ids": ids, "attention_mask": mask}))

    assert max(float((together[name] - one_by_one[name]).abs().max()) for name in together) < 1e-5


def test_experts_that_are_stored_fused_are_walked_and_merged_only() -> None:
    import transformers as hf
    from tiny_models import SIZE, TEXT

    from merging.backbones.transformers import AnyTransformers

    torch.manual_seed(0)
    config = hf.GraniteMoeConfig(
        **SIZE, **TEXT, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    model: nn.Module = hf.GraniteMoeForCausalLM(config).eval()
    model.config.architectures = [type(model).__name__]
    base = stored(model)
    experts = {"a": near(base, 1), "b": near(base, 2)}
    models = opened(base, experts, AnyTransformers(model.config))

    for rule in (RegMean, FeatCal):
        result, notes = made_by(rule(), models, same_data(experts, *BATCHES))

        assert set(result) == set(base)
        fused = {why for name, why in notes["left"].items() if base[name].ndim == 3}
        assert all(why.startswith("neither a linear nor a norm: GraniteMoe") for why in fused)
