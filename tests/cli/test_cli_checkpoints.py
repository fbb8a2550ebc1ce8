"""`merging inspect` and `merging compare` on small real models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def tiny_llama(folder: Path, *, tied: bool = False, noise: float = 0.0) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return folder


def test_inspect_lists_tensors_stacks_and_ties(merging_command, tmp_path):
    model = tiny_llama(tmp_path / "model", tied=True)

    answer = merging_command("inspect", model, "--json", "--quiet")

    found = answer.json()
    assert found["stacks"] == {"model.layers": 2}
    assert found["architecture"] == "LlamaForCausalLM"
    assert [sorted(names) for names in found["ties"]] == [["lm_head.weight", "model.embed_tokens.weight"]]
    assert found["totals"]["float32"]["tensors"] == len(found["tensors"])


def test_inspect_prints_shapes_and_totals(merging_command, tmp_path):
    answer = merging_command("inspect", tiny_llama(tmp_path / "model"))

    assert answer.code == 0
    assert "64 x 32" in answer.out
    assert "stack model.layers" in answer.out


def test_inspect_finds_tensors_that_are_stored_twice(merging_command, tmp_path):
    from safetensors.torch import save_file

    weight = torch.randn(4, 4)
    tensors = {"x.0.a": weight, "x.1.a": weight.clone(), "x.2.a": torch.zeros(4, 4), "y": torch.zeros(4, 4)}
    save_file(tensors, tmp_path / "model.safetensors")

    found = merging_command("inspect", tmp_path, "--json").json()

    assert found["ties"] == [["x.0.a", "x.1.a"]]
    assert found["stacks"] == {"x": 3}


def test_compare_gives_size_and_cosine_per_block(merging_command, tmp_path):
    base = tiny_llama(tmp_path / "base")
    expert = tiny_llama(tmp_path / "expert", noise=0.02)

    found = merging_command("compare", base, expert, "--json").json()

    blocks = {row["block"]: row for row in found["blocks"]}
    assert {"model.layers.0", "model.layers.1", "outside the blocks"} == set(blocks)
    assert 0 < blocks["model.layers.0"]["relative"] < 2
    assert found["total"]["tensors"] == sum(row["tensors"] for row in blocks.values())
    assert found["misfits"] == []


def test_a_model_compared_with_itself_does_not_differ(merging_command, tmp_path):
    base = tiny_llama(tmp_path / "base")

    found = merging_command("compare", base, base, "--json").json()

    assert found["total"]["difference"] == 0
    assert found["total"]["cosine"] == pytest.approx(1)


def test_compare_lists_every_misfit(merging_command, tmp_path):
    from safetensors.torch import save_file

    for name in ("base", "expert"):
        (tmp_path / name).mkdir()
    base = {"a": torch.ones(2, 2), "b": torch.ones(3), "c": torch.ones(2), "d": torch.ones(2)}
    expert = {"a": torch.ones(2, 3), "b": torch.ones(3).half(), "c": torch.ones(2), "e": torch.ones(1)}
    save_file(base, tmp_path / "base" / "model.safetensors")
    save_file(expert, tmp_path / "expert" / "model.safetensors")

    answer = merging_command("compare", tmp_path / "base", tmp_path / "expert")
    found = merging_command("compare", tmp_path / "base", tmp_path / "expert", "--json").json()

    assert {(row["tensor"], row["kind"]) for row in found["misfits"]} == {
        ("a", "shape"),
        ("b", "dtype"),
        ("d", "missing"),
        ("e", "extra"),
    }
    assert "4 misfits" in answer.out
