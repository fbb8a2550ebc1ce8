"""Names in files meet names in modules as from_pretrained would have it."""

from __future__ import annotations

import torch
from accelerate import init_empty_weights

from merging.checkpoints.names import NameMap, module_names
from merging.checkpoints.safetensors import SafetensorsSource


def skeleton(cls, config):
    with init_empty_weights(include_buffers=False):
        return cls(config)


def mapped(cls, config, names) -> NameMap:
    return module_names(skeleton(cls, config), names)


def assert_whole(found: NameMap, model: torch.nn.Module) -> None:
    assert found.missing == ()
    assert found.unused == ()
    assert set(found.renamed.values()) <= set(model.state_dict())


def stored_names(model, folder):
    model.save_pretrained(folder)
    return SafetensorsSource(folder).names()


def test_clip_tower_as_saved_today(tiny, tmp_path):
    model = tiny("clip_vision")
    found = module_names(skeleton(type(model), model.config), stored_names(model, tmp_path))
    assert_whole(found, model)
    assert found.stripped == ""


def test_clip_tower_with_the_old_prefix(tiny, tmp_path):
    model = tiny("clip_vision")
    names = [f"vision_model.{name}" for name in stored_names(model, tmp_path)]
    found = module_names(skeleton(type(model), model.config), names)
    assert_whole(found, model)
    assert found.stripped == "vision_model."


def test_clip_tower_out_of_a_whole_clip_model(tiny, tmp_path):
    whole, tower = tiny("clip"), tiny("clip_vision")
    found = module_names(skeleton(type(tower), tower.config), stored_names(whole, tmp_path))
    assert found.missing == ()
    assert set(found.renamed.values()) == set(tower.state_dict())
    assert "logit_scale" in found.unused
    assert all(name.startswith("vision_model.") for name in found.renamed)


def test_vit_with_a_head_read_by_a_vit_without(tiny, tmp_path):
    full, headless = tiny("vit_classifier"), tiny("vit")
    found = module_names(skeleton(type(headless), headless.config), stored_names(full, tmp_path))
    assert found.unused == ("classifier.bias", "classifier.weight")
    assert found.missing == ("pooler.dense.weight", "pooler.dense.bias")
    assert found.stripped == "vit."


def test_vit_without_a_head_read_by_a_vit_with_one(tiny, tmp_path):
    full, headless = tiny("vit_classifier"), tiny("vit")
    found = module_names(skeleton(type(full), full.config), stored_names(headless, tmp_path))
    assert found.missing == ("classifier.weight", "classifier.bias")
    assert found.unused == ("pooler.dense.bias", "pooler.dense.weight")


def test_dinov2(tiny, tmp_path):
    model = tiny("dinov2")
    assert_whole(module_names(skeleton(type(model), model.config), stored_names(model, tmp_path)), model)


def test_llama_untied(tiny, tmp_path):
    model = tiny("llama")
    found = module_names(skeleton(type(model), model.config), stored_names(model, tmp_path))
    assert_whole(found, model)
    assert "lm_head.weight" in found.renamed


def test_llama_tied_does_not_miss_its_head(tiny, tmp_path):
    model = tiny("llama_tied")
    names = stored_names(model, tmp_path)
    found = module_names(skeleton(type(model), model.config), names)
    assert "lm_head.weight" not in names
    assert_whole(found, model)


def test_llama_missing_a_projection_says_so(tiny, tmp_path):
    model = tiny("llama")
    gone = "model.layers.1.self_attn.q_proj.weight"
    names = [name for name in stored_names(model, tmp_path) if name != gone]
    assert module_names(skeleton(type(model), model.config), names).missing == (gone,)


def test_t5_stores_its_shared_embedding_once(tiny, tmp_path):
    model = tiny("t5")
    names = stored_names(model, tmp_path)
    found = module_names(skeleton(type(model), model.config), names)
    assert "shared.weight" in names
    assert "lm_head.weight" not in names
    assert_whole(found, model)


def test_bert_with_old_prefix_and_old_norm_names(tiny, tmp_path):
    model = tiny("bert")
    old = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        for name in stored_names(model, tmp_path)
    }
    assert any(name.endswith("gamma") for name in old)
    found = module_names(skeleton(type(model), model.config), sorted(old))
    assert_whole(found, model)
    assert found.stripped == "bert."


def test_gpt2_with_and_without_its_prefix(tiny, tmp_path):
    model = tiny("gpt2")
    names = stored_names(model, tmp_path)
    assert all(name.startswith("transformer.") for name in names)
    for stored in (names, [name.removeprefix("transformer.") for name in names]):
        assert_whole(module_names(skeleton(type(model), model.config), stored), model)


def test_mixtral_experts_are_converted_not_renamed(tiny, tmp_path):
    model = tiny("mixtral")
    found = module_names(skeleton(type(model), model.config), stored_names(model, tmp_path))
    assert found.missing == ()
    assert found.unused == ()
    inside = found.converted["model.layers.0.block_sparse_moe.experts.0.w1.weight"]
    assert inside == "model.layers.0.mlp.experts.gate_up_proj"
    assert found.renamed["model.layers.0.block_sparse_moe.gate.weight"] == "model.layers.0.mlp.gate.weight"


def test_renamed_tensors_are_what_from_pretrained_puts_there(tiny, tmp_path):
    for kind in ("clip_vision", "vit_classifier", "dinov2", "llama_tied", "t5", "bert", "gpt2"):
        model = tiny(kind)
        found = module_names(skeleton(type(model), model.config), stored_names(model, tmp_path / kind))
        source = SafetensorsSource(tmp_path / kind)
        state = type(model).from_pretrained(tmp_path / kind).state_dict()
        for stored, inside in found.renamed.items():
            assert torch.equal(source.read(stored), state[inside]), (kind, stored)


def test_a_plain_module_has_the_names_of_its_state_dict():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    found = module_names(model, [*list(model.state_dict())[:-1], "other.weight"])
    assert found.missing == ("1.num_batches_tracked",)
    assert found.unused == ("other.weight",)
    assert found.renamed["0.weight"] == "0.weight"


def test_a_tensor_stored_twice_counts_under_its_plain_name(tiny):
    model = tiny("clip_vision")
    plain = "embeddings.class_embedding"
    found = module_names(model, [f"vision_model.{plain}", plain])
    assert found.renamed == {plain: plain}
    assert found.unused == (f"vision_model.{plain}",)
