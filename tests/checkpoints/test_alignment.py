"""Experts under the base's names: what is bridged, what is reported, what is set aside and said to be."""

from __future__ import annotations

import torch

from merging.checkpoints.alignment import align
from merging.checkpoints.source import StateDictSource


def stored(model, tmp_path, name="model"):
    from merging.checkpoints.safetensors import SafetensorsSource

    model.save_pretrained(tmp_path / name)
    source = SafetensorsSource(tmp_path / name, name)
    return {name: source.read(name) for name in source.names()}


def no_heads(name):
    return False


def classifier(name):
    return name.startswith("classifier.")


def aligned(base, expert, model=None, is_head=no_heads, **more):
    return align(
        StateDictSource(base, "base"), StateDictSource(expert, 'expert "mnist"'), model, is_head, **more
    )


def text(found):
    return "\n".join(str(problem) for problem in found.problems)


def test_the_same_names_are_the_identity_without_any_model(tiny, tmp_path):
    base = stored(tiny("llama"), tmp_path)
    found = aligned(base, base)
    assert found.source.names() == tuple(base)
    assert (found.problems, found.notes, found.absent, found.extra_heads) == ([], (), (), {})


def test_an_expert_with_the_old_prefix_comes_under_the_names_of_the_base(tiny, tmp_path):
    model = tiny("clip_vision")
    base = stored(model, tmp_path)
    expert = {f"vision_model.{name}": tensor + 1 for name, tensor in base.items()}
    found = aligned(base, expert, model)
    assert text(found) == ""
    assert found.source.names() == tuple(base)
    assert all(torch.equal(found.source.read(name), base[name] + 1) for name in base)


def test_a_base_with_the_old_prefix_keeps_its_names(tiny, tmp_path):
    model = tiny("clip_vision")
    expert = stored(model, tmp_path)
    base = {f"vision_model.{name}": tensor for name, tensor in expert.items()}
    found = aligned(base, expert, model)
    assert text(found) == ""
    assert found.source.names() == tuple(base)


def test_the_tower_of_a_whole_clip_model_is_used_and_the_rest_is_noted(tiny, tmp_path):
    tower, whole = tiny("clip_vision"), tiny("clip", seed=1)
    base, expert = stored(tower, tmp_path, "tower"), stored(whole, tmp_path, "whole")
    found = aligned(base, expert, tower)
    assert text(found) == ""
    assert all(torch.equal(found.source.read(name), expert[f"vision_model.{name}"]) for name in base)
    assert "outside the model" in found.notes[0]
    assert "logit_scale" in found.notes[0]


def test_a_whole_clip_model_as_base_keeps_what_a_tower_lacks(tiny, tmp_path):
    tower, whole = tiny("clip_vision"), tiny("clip")
    base, expert = stored(whole, tmp_path, "whole"), stored(tower, tmp_path, "tower")
    found = aligned(base, expert, tower)
    assert text(found) == ""
    assert "text_projection.weight" in found.absent
    assert len(found.source.names()) == len(expert)


def test_differing_prefixes_without_rules_are_one_answer_with_examples_and_the_prefix(tiny, tmp_path):
    base = stored(tiny("clip_vision"), tmp_path)
    expert = {f"vision_model.{name}": tensor for name, tensor in base.items()}
    found = aligned(base, expert)
    assert len(found.problems) == 2
    assert f"{len(base)} of {len(base)} tensors of the base are missing" in text(found)
    assert "vision_model.embeddings.class_embedding" in text(found)
    assert 'names of the expert begin with "vision_model."' in text(found)


def test_missing_extra_and_misshapen_are_reported_together(tiny, tmp_path):
    base = stored(tiny("llama"), tmp_path, "base")
    expert = stored(tiny("llama", vocab_size=70), tmp_path, "expert")
    del expert["model.layers.1.self_attn.q_proj.weight"]
    expert["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    found = aligned(base, expert, tiny("llama"))
    assert "1 of 21 tensors of the base are missing: model.layers.1.self_attn.q_proj.weight" in text(found)
    assert "1 tensor is not in the base: model.layers.0.self_attn.q_norm.weight" in text(found)
    assert "2 of 21 tensors differ in shape" in text(found)
    assert "(base 64 x 32, expert 70 x 32)" in text(found)
    assert "vocabularies differ" in text(found)
    assert all(problem.where == 'expert "mnist"' for problem in found.problems)


def test_another_depth_is_extra_and_missing_tensors(tiny, tmp_path):
    shallow, deep = tiny("llama"), tiny("llama", num_hidden_layers=3)
    base, expert = stored(shallow, tmp_path, "base"), stored(deep, tmp_path, "expert")
    assert "9 tensors are not in the base: model.layers.2." in text(aligned(base, expert, shallow))
    assert "9 of 30 tensors of the base are missing" in text(aligned(expert, base, deep))


def test_heads_of_other_sizes_are_set_aside_for_their_task(tiny, tmp_path):
    model = tiny("vit_classifier", num_labels=5)
    base = stored(model, tmp_path, "base")
    expert = stored(tiny("vit_classifier", num_labels=3), tmp_path, "expert")
    found = aligned(base, expert, model, classifier)
    assert found.problems == []
    assert found.extra_heads == {
        "classifier.weight": "classifier.weight",
        "classifier.bias": "classifier.bias",
    }
    assert set(found.absent) == set(found.extra_heads)
    assert set(found.source.names()) == set(base) - set(found.extra_heads)


def test_heads_that_a_headless_base_lacks_are_set_aside(tiny, tmp_path):
    model = tiny("vit")
    base = stored(model, tmp_path, "base")
    expert = stored(tiny("vit_classifier"), tmp_path, "expert")
    found = aligned(base, expert, model, lambda name: name.startswith(("classifier.", "pooler.")))
    assert text(found) == ""
    assert found.extra_heads == {
        "classifier.weight": "classifier.weight",
        "classifier.bias": "classifier.bias",
    }
    assert set(found.absent) == {"pooler.dense.weight", "pooler.dense.bias"}
    assert torch.equal(found.source.read("embeddings.cls_token"), expert["vit.embeddings.cls_token"])


def test_a_missing_pooler_that_is_no_head_is_a_problem(tiny, tmp_path):
    model = tiny("vit")
    base, expert = stored(model, tmp_path, "base"), stored(tiny("vit_classifier"), tmp_path, "expert")
    found = aligned(base, expert, model, classifier)
    assert "2 of 40 tensors of the base are missing: pooler.dense.bias, pooler.dense.weight" in text(found)


def test_a_stored_head_equal_to_its_embedding_is_fine_for_a_tied_base(tiny, tmp_path):
    model = tiny("llama_tied")
    base = stored(model, tmp_path)
    expert = {**base, "lm_head.weight": base["model.embed_tokens.weight"].clone()}
    found = aligned(base, expert, model)
    assert text(found) == ""
    assert "stored although tied, and equal: lm_head.weight" in found.notes[0]


def test_a_trained_head_of_its_own_is_a_problem_for_a_tied_base(tiny, tmp_path):
    model = tiny("llama_tied")
    base = stored(model, tmp_path)
    expert = {**base, "lm_head.weight": base["model.embed_tokens.weight"] + 0.1}
    found = aligned(base, expert, model)
    assert 'lm_head.weight: differs from "model.embed_tokens.weight"' in text(found)
    assert "tie_word_embeddings: false" in text(found)


def test_a_head_that_a_tied_expert_does_not_store_is_its_embedding(tiny, tmp_path):
    untied, tied = tiny("llama"), tiny("llama_tied", seed=1)
    base, expert = stored(untied, tmp_path, "base"), stored(tied, tmp_path, "expert")
    refused = text(aligned(base, expert, untied))
    assert "missing: lm_head.weight" in refused
    assert "tie_word_embeddings" in refused
    found = aligned(base, expert, untied, tied=True)
    assert text(found) == ""
    assert torch.equal(found.source.read("lm_head.weight"), expert["model.embed_tokens.weight"])
    assert any("lm_head.weight" in note for note in found.notes)


def test_t5_experts_may_store_the_shared_embedding_under_each_of_its_names(tiny, tmp_path):
    model = tiny("t5")
    base = stored(model, tmp_path)
    shared = base["shared.weight"]
    expert = {
        **{name: tensor for name, tensor in base.items() if name != "shared.weight"},
        "encoder.embed_tokens.weight": shared + 1,
        "decoder.embed_tokens.weight": shared + 1,
    }
    found = aligned(base, expert, model)
    assert text(found) == ""
    assert torch.equal(found.source.read("shared.weight"), shared + 1)


def test_integers_may_be_extra_or_missing_and_dtypes_may_differ(tiny, tmp_path):
    model = tiny("clip_vision")
    base = stored(model, tmp_path)
    positions = {"embeddings.position_ids": torch.arange(17)}
    half = {name: tensor.half() for name, tensor in base.items()}
    found = aligned(base, {**half, **positions}, model)
    assert text(found) == ""
    assert "position_ids" in found.notes[0]
    found = aligned({**base, **positions}, half, model)
    assert text(found) == ""
    assert found.absent == ("embeddings.position_ids",)


def test_mixtral_keeps_its_stored_names(tiny, tmp_path):
    model = tiny("mixtral")
    base = stored(model, tmp_path)
    found = aligned(base, base, model)
    assert text(found) == ""
    assert found.source.names() == tuple(base)


def test_bert_with_old_names_of_its_norms(tiny, tmp_path):
    model = tiny("bert")
    base = stored(model, tmp_path)
    expert = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in base.items()
    }
    expert["cls.predictions.bias"] = torch.zeros(64)
    found = aligned(base, expert, model)
    assert text(found) == ""
    assert found.source.names() == tuple(base)
    assert "cls.predictions.bias" in found.notes[0]


def test_integers_in_place_of_floats_are_a_problem(tiny, tmp_path):
    base = stored(tiny("llama"), tmp_path)
    expert = {**base, "model.norm.weight": torch.ones(32, dtype=torch.int8)}
    assert "stored as int8" in text(aligned(base, expert))


def test_tables_of_old_files_that_the_model_now_computes_are_noted(tiny, tmp_path):
    model = tiny("llama")
    base = stored(model, tmp_path)
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    found = aligned(base, {**base, **table}, model)
    assert text(found) == ""
    assert "computes itself" in found.notes[0]
    found = aligned({**base, **table}, base, model)
    assert text(found) == ""
    assert found.absent == tuple(table)


def test_causal_masks_of_old_gpt2_files_are_noted(tiny, tmp_path):
    model = tiny("gpt2")
    base = stored(model, tmp_path)
    old = {name.removeprefix("transformer."): tensor + 1 for name, tensor in base.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    found = aligned(base, old, model)
    assert text(found) == ""
    assert found.source.names() == tuple(base)
    assert "h.0.attn.bias" in found.notes[0]
