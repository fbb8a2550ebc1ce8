"""Experts whose config, image processor or tokenizer is not the base's are found before the work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_models import GROUPED
from tiny_pictures import picture_suite
from tiny_texts import tokenizer

from merging.config_comparison import compare_configs
from merging.errors import MergingError
from merging.pipeline import Pipeline


def write(folder: Path, name: str, values: Mapping[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(values))


def change(file: Path, **values: Any) -> None:
    """Set entries; None removes one."""
    found = {**json.loads(file.read_bytes()), **values}
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def compared(folder: Path, base: Mapping[str, Any], expert: Mapping[str, Any]) -> Any:
    write(folder / "base", "config.json", base)
    write(folder / "expert", "config.json", expert)
    return compare_configs(folder / "base", folder / "expert")


def llama(folder: Path, **config: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**GROUPED, "num_hidden_layers": 1}, **config))
    for name in ("base", "digits"):
        model.save_pretrained(folder / name)
        tokenizer("causal").save_pretrained(folder / name)
    return {
        "base": str(folder / "base"),
        "experts": {"digits": str(folder / "digits")},
        "merge": "average",
        "device": "cpu",
        "output": {"path": str(folder / "out")},
    }


def warned(spec: Mapping[str, Any]) -> str:
    return "\n".join(one for one in Pipeline.from_spec(dict(spec)).validate() if "[processor]" in one)


def refused(spec: Mapping[str, Any]) -> MergingError:
    with pytest.raises(MergingError) as caught:
        Pipeline.from_spec(dict(spec)).validate()
    return caught.value


def test_another_model_type_is_found_though_all_tensors_fit(tmp_path: Path) -> None:
    spec = llama(tmp_path)
    change(tmp_path / "digits" / "config.json", model_type="mistral", architectures=["MistralForCausalLM"])

    error = refused(spec)

    (problem,) = error.problems
    assert problem.where == 'expert "digits"'
    assert problem.name == "config"
    assert "model_type 'mistral', the base has 'llama'" in problem.what
    assert error.exit_code == 2
    assert Pipeline.from_spec({**spec, "allow": ["config"]}).validate()


def test_a_field_that_only_one_names_is_compared_with_the_default_of_the_class(tmp_path: Path) -> None:
    plain = {"model_type": "llama", "hidden_size": 32}

    told = compared(tmp_path, plain, {**plain, "attention_bias": True, "rms_norm_eps": 1e-6})
    missing = compared(tmp_path, {**plain, "rms_norm_eps": 1e-5}, plain)

    assert told.both == ("attention_bias True, the base has False",)  # 1e-06 is the default
    assert missing.both == ("rms_norm_eps 1e-06, the base has 1e-05",)


def test_a_config_without_a_model_type_is_read_as_of_the_others(tmp_path: Path) -> None:
    found = compared(tmp_path, {"model_type": "llama", "hidden_size": 32}, {"hidden_size": 32})
    other = compared(
        tmp_path, {"model_type": "llama", "hidden_size": 32}, {"hidden_size": 32, "mlp_bias": True}
    )

    assert found == ((), ())
    assert other.both == ("mlp_bias True, the base has False",)


def test_part_of_a_setting_that_only_one_has_stops(tmp_path: Path) -> None:
    plain = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    scaled = {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    }

    found = compared(tmp_path, plain, scaled)

    assert "rope_parameters.factor 2.0, the base has none" in found.both


def test_a_field_that_no_class_declares_is_warned_of_and_what_changes_nothing_is_not(tmp_path: Path) -> None:
    plain = {"model_type": "a_type_of_nobody", "hidden": 32}

    found = compared(tmp_path, {**plain, "alibi": True}, {**plain, "num_heads": 4, "finetuned_by": "me"})

    assert found.both == ()
    assert found.single == ("num_heads 4, the base has none", "no alibi, the base has True")
    spec = llama(tmp_path / "run")
    change(tmp_path / "run" / "digits" / "config.json", qk_norm=True)
    notes = "\n".join(Pipeline.from_spec(spec).validate())
    assert "only one of its config and the base's says it: qk_norm True, the base has none" in notes


def test_a_whole_clip_is_compared_with_a_tower_of_it(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "num_attention_heads": 4}
    whole = {"model_type": "clip", "vision_config": vision, "text_config": {"hidden_size": 64}}  # of 8 heads
    text = {"model_type": "clip_text_model", "hidden_size": 64}

    assert compared(tmp_path, {"model_type": "clip_vision_model", **vision}, whole) == ((), ())
    assert compared(tmp_path, whole, {"model_type": "clip_vision_model", **vision}) == ((), ())
    assert compared(tmp_path, text, whole) == ((), ())
    other = compared(tmp_path, {"model_type": "clip_vision_model", **vision, "hidden_act": "gelu"}, whole)
    assert other.both == ("hidden_act 'quick_gelu', the base has 'gelu'",)


def test_other_means_of_pictures_are_warned_of_with_both_values(tmp_path: Path) -> None:
    spec = picture_suite(tmp_path)
    hf.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3], resample=3
    ).save_pretrained(tmp_path / "digits")

    said = warned(spec)

    assert 'expert "digits"' in said
    assert "image_mean [0.1, 0.2, 0.3], the base has [0.5, 0.5, 0.5]" in said
    assert "resample 3, the base has 2" in said
    report = Pipeline.from_spec(spec).run()
    assert any("[processor]" in one for one in report.warnings)
    assert not warned({**spec, "allow": ["processor"]})


def test_pictures_of_another_size_stop_where_there_are_any(tmp_path: Path) -> None:
    spec = picture_suite(tmp_path, model=hf.Dinov2Model)
    hf.ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(tmp_path / "digits")

    error = refused(spec)

    (problem,) = error.problems
    assert problem.name == "processor"
    assert "makes pictures of 3 x 64 x 64, the base's of 3 x 32 x 32" in problem.what
    assert '"allow": ["processor"]' in str(error)
    assert "3 x 64 x 64" in warned({**spec, "tasks": {}})


def test_the_same_settings_written_otherwise_are_no_finding(tmp_path: Path) -> None:
    spec = picture_suite(tmp_path)
    write(
        tmp_path / "digits",
        "preprocessor_config.json",
        {"feature_extractor_type": "ViTFeatureExtractor", "size": 32, "image_mean": [0.5, 0.5, 0.5]},
    )

    assert not warned(spec)


def test_another_tokenizer_config_is_warned_of_with_both_values(tmp_path: Path) -> None:
    spec = llama(tmp_path)
    change(tmp_path / "digits" / "tokenizer_config.json", padding_side="left", model_max_length=7)
    (tmp_path / "digits" / "chat_template.jinja").write_text("{{ messages }}")
    change(tmp_path / "base" / "tokenizer_config.json", padding_side="right", model_max_length=99)

    said = warned(spec)

    assert 'padding_side "left", the base has "right"' in said
    assert "model_max_length 7, the base has 99" in said
    assert 'chat_template "{{ messages }}", the base has none' in said


def test_tokenizers_that_read_a_text_otherwise_are_told_by_what_they_make_of_it(tmp_path: Path) -> None:
    spec = llama(tmp_path)
    tokenizer("encoder").save_pretrained(tmp_path / "digits")

    said = warned(spec)

    assert "to the base's" in said
    assert "</s>" in said


def test_tokenizers_that_read_alike_are_no_finding(tmp_path: Path) -> None:
    spec = llama(tmp_path)
    change(tmp_path / "digits" / "tokenizer_config.json", name_or_path="elsewhere", added_by="me")

    assert not warned(spec)
