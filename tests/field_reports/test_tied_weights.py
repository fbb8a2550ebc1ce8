"""Tied and shared weights: what people report, and what they see here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft_adapters import adapted
from safetensors.torch import save_file
from small_models import (
    added_up,
    change_config,
    expert,
    llama,
    rewritten,
    run,
    saved,
    spec_of,
    tensors_in,
)
from torch import Tensor, nn

from merging.errors import CheckpointError, TracingError
from merging.pipeline import Pipeline

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tokens(folder: Path) -> dict[str, Any]:
    """Calibration examples."""
    ids = torch.randint(0, 60, (8, 6), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, folder / "data.safetensors")
    return {"calibration": {"type": "tensors", "path": str(folder / "data.safetensors")}}


def untied(folder: Path, seed: int, *, own_head: bool) -> Path:
    """An expert of the tied model that says it is untied, its head with or without values of its own."""
    saved(expert(llama(tied=True), seed), folder)
    tensors = tensors_in(folder)
    generator = torch.Generator().manual_seed(seed + 100)
    shift = 0.05 * torch.randn(tensors[EMBEDDING].shape, generator=generator) if own_head else 0
    rewritten(folder, {**tensors, HEAD: tensors[EMBEDDING] + shift})
    change_config(folder, tie_word_embeddings=False)
    return folder


@pytest.mark.parametrize("rule", ["task_arithmetic", "regmean"])
def test_a_tied_head_is_not_missed_and_not_written(tmp_path: Path, rule: str) -> None:
    base = llama(tied=True)
    saved(base, tmp_path / "base")
    experts = {str(seed): saved(expert(base, seed), tmp_path / str(seed)) for seed in (1, 2)}
    source = tokens(tmp_path)
    spec = spec_of(tmp_path / "base", experts, {"type": rule}, tasks=dict.fromkeys(experts, source))

    merged = run(tmp_path / "out", spec)

    found = tensors_in(merged)
    assert HEAD not in found
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is True
    model = hf.AutoModelForCausalLM.from_pretrained(merged)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    memory = llama(tied=True)
    memory.load_state_dict({**found, HEAD: found[EMBEDDING]})
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(model(ids).logits, memory(ids).logits)


def test_head_and_embedding_that_an_adapter_trained_apart_are_not_tied_again_on_the_quiet(
    tmp_path: Path,
) -> None:
    base = llama(tied=True)
    saved(base, tmp_path / "base")
    adapted(base, tmp_path / "one", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])

    with pytest.raises(CheckpointError, match="ties"):
        Pipeline.from_spec(spec_of(tmp_path / "base", {"one": {"adapter": str(tmp_path / "one")}})).validate()


def test_on_an_untied_base_an_adapters_embedding_and_head_are_both_written(tmp_path: Path) -> None:
    base = llama()
    saved(base, tmp_path / "base")
    folded = adapted(
        base, tmp_path / "one", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    )
    spec = spec_of(tmp_path / "base", {"one": {"adapter": str(tmp_path / "one")}}, {"type": "average"})

    merged = run(tmp_path / "out", spec)

    model = hf.AutoModelForCausalLM.from_pretrained(merged)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.allclose(model.lm_head.weight, folded[HEAD], atol=1e-6)
    assert torch.allclose(model.model.embed_tokens.weight, folded[EMBEDDING], atol=1e-6)


def test_a_trained_head_does_not_vanish_into_a_tied_base(tmp_path: Path) -> None:
    saved(llama(tied=True), tmp_path / "base")
    saved(expert(llama(tied=True), 1), tmp_path / "tied")
    untied(tmp_path / "own", 2, own_head=True)
    experts = {name: tmp_path / name for name in ("tied", "own")}

    with pytest.raises(CheckpointError) as caught:
        Pipeline.from_spec(spec_of(tmp_path / "base", experts)).validate()

    assert f'expert "own": {HEAD}' in str(caught.value)
    assert "would be lost" in str(caught.value)


def test_a_head_that_is_stored_and_equal_does_not_force_untying(tmp_path: Path) -> None:
    saved(llama(tied=True), tmp_path / "base")
    saved(expert(llama(tied=True), 1), tmp_path / "tied")
    untied(tmp_path / "equal", 2, own_head=False)
    experts = {name: tmp_path / name for name in ("tied", "equal")}

    merged = run(tmp_path / "out", spec_of(tmp_path / "base", experts))

    start = tensors_in(tmp_path / "base")
    given = [{name: tensors_in(one)[name] for name in start} for one in experts.values()]
    oracle = added_up(start, given, 0.3)
    found = tensors_in(merged)
    assert found.keys() == start.keys()
    assert all(torch.allclose(found[name].double(), oracle[name], atol=1e-6) for name in oracle)


@pytest.mark.parametrize("rule", [{"type": "task_arithmetic", "scale": 0.3}, {"type": "average"}])
def test_on_an_untied_base_a_tied_experts_head_is_its_embedding(tmp_path: Path, rule: dict[str, Any]) -> None:
    saved(llama(), tmp_path / "base")
    saved(expert(llama(tied=True), 1), tmp_path / "tied")
    untied(tmp_path / "own", 2, own_head=True)
    experts = {name: tmp_path / name for name in ("tied", "own")}

    merged = run(tmp_path / "out", spec_of(tmp_path / "base", experts, rule, allow=["other_base"]))

    start, found = tensors_in(tmp_path / "base"), tensors_in(merged)
    tied = tensors_in(experts["tied"])
    given: list[dict[str, Tensor]] = [{**tied, HEAD: tied[EMBEDDING]}, tensors_in(experts["own"])]
    averaged = {name: (given[0][name].double() + given[1][name].double()) / 2 for name in start}
    oracle = averaged if rule["type"] == "average" else added_up(start, given, 0.3)
    assert all(torch.allclose(found[name].double(), oracle[name], atol=1e-6) for name in start)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is False


def test_known_ties_are_stored_once_and_t5_comes_out_as_it_went_in(tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    base = hf.T5ForConditionalGeneration(hf.T5Config(**size, decoder_start_token_id=0))
    saved(base, tmp_path / "base")
    saved(expert(base, 1), tmp_path / "one")

    merged = run(tmp_path / "out", spec_of(tmp_path / "base", {"one": tmp_path / "one"}, {"type": "average"}))

    found, wanted = tensors_in(merged), tensors_in(tmp_path / "one")
    assert found.keys() == wanted.keys() == tensors_in(tmp_path / "base").keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    hf.T5ForConditionalGeneration.from_pretrained(merged)


def test_two_names_over_one_storage_that_no_class_knows_are_stored_as_copies(tmp_path: Path) -> None:
    shared = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    flat = torch.randn(48, generator=torch.Generator().manual_seed(1))
    state = {"a.weight": shared, "b.weight": shared, "c.weight": flat.view(6, 8).T}
    for name, shift in (("base", 0.0), ("one", 0.1)):
        (tmp_path / name).mkdir()
        torch.save(
            {key: value + shift if shift else value for key, value in state.items()},
            tmp_path / name / "m.bin",
        )

    merged = run(tmp_path / "out", spec_of(tmp_path / "base", {"one": tmp_path / "one"}, {"type": "average"}))

    found = tensors_in(merged)
    assert all(torch.equal(found[name], tensor + 0.1) for name, tensor in state.items())


@pytest.mark.parametrize("method", ["featcal", "regmean"])
def test_a_layer_that_is_used_twice_is_refused_by_name(method: str) -> None:
    from tiny_models import expert_of, opened, same_data

    from merging.backbones.transformers import AnyTransformers
    from merging.checkpoints.sink import StateDictSink
    from merging.components import calibrators, strategies

    class Twice(AnyTransformers):
        def skeleton(self) -> nn.Module:
            model = super().skeleton()
            model.model.layers[1] = model.model.layers[0]
            return model

    model = llama()
    model.model.layers[1] = model.model.layers[0]
    model.config.architectures = ["LlamaForCausalLM"]
    stored = {name: tensor for name, tensor in model.state_dict().items() if "layers.1." not in name}
    experts = {
        str(seed): {name: tensor for name, tensor in expert_of(model, seed).items() if name in stored}
        for seed in (1, 2)
    }
    models = opened(stored, experts, Twice(model.config))
    ids = torch.randint(0, 60, (8, 6), generator=torch.Generator().manual_seed(0))
    data = same_data(experts, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    sink = StateDictSink(models.base)

    def solve() -> None:
        if method == "regmean":
            strategies.get("regmean")().merge(models, data, sink)
        else:
            calibrators.get("featcal")().calibrate(models.experts["1"], models, data, sink)

    with pytest.raises(TracingError, match=r'"model\.layers\.1" runs 2 times in one forward'):
        solve()
