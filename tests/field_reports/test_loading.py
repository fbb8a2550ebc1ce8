"""Loading and formats: what people report, and what they see here."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from peft_adapters import adapted
from safetensors.torch import save_file
from small_models import (
    added_up,
    change_config,
    clip_tower,
    expert,
    llama,
    resized,
    rewritten,
    run,
    saved,
    spec_of,
    tensors_in,
)
from torch import Tensor, nn

from merging.errors import CheckpointError, MergingError
from merging.pipeline import Pipeline

AVERAGE = {"type": "average"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    saved(llama(), folder / "base")
    saved(expert(llama(), 1), folder / "one")
    return folder


def pickled(folder: Path, models: Path, content: Any) -> Path:
    """A folder of the base's config with a pickle beside it."""
    folder.mkdir()
    (folder / "config.json").write_text((models / "one" / "config.json").read_text())
    torch.save(content, folder / "pytorch_model.bin")
    return folder


def merged_with(models: Path, folder: Path, out: Path) -> dict[str, Tensor]:
    """The average of one expert is the expert."""
    return tensors_in(run(out, spec_of(models / "base", {"one": folder}, AVERAGE)))


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def notes_of(models: Path, folder: Path) -> str:
    return "\n".join(Pipeline.from_spec(spec_of(models / "base", {"one": folder}, AVERAGE)).validate())


class Trap:
    """Loading it writes a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return (open, (str(self.place), "w"))


def test_a_pickled_whole_module_is_refused_before_anything_of_it_is_built(
    models: Path, tmp_path: Path
) -> None:
    torch.save(llama(), tmp_path / "expert.pt")
    out = tmp_path / "out"

    with pytest.raises(CheckpointError) as caught:
        Pipeline.from_spec(spec_of(models / "base", {"one": tmp_path / "expert.pt"})).run(out)

    text = str(caught.value)
    assert "expert.pt holds code and not only tensors" in text
    assert "safetensors" in text
    assert "weights_only" not in text
    assert caught.value.exit_code == 2
    assert not out.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "weights.ckpt"])
def test_code_in_a_pickle_never_runs(models: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "one").mkdir()
    torch.save({"a": torch.ones(2), "trap": Trap(tmp_path / "pwned.txt")}, tmp_path / "one" / name)

    with pytest.raises(CheckpointError, match="holds code and not only tensors"):
        Pipeline.from_spec(spec_of(models / "base", {"one": tmp_path / "one"})).validate()
    assert not (tmp_path / "pwned.txt").exists()


def shared_storage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    views, start = {}, 0
    for name, tensor in tensors.items():
        views[name] = flat[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
    return views


HARMLESS: dict[str, Any] = {
    "parameters": lambda tensors: {name: nn.Parameter(tensor) for name, tensor in tensors.items()},
    "ordered": lambda tensors: OrderedDict(tensors),
    "views_of_one_storage": shared_storage,
    "transposed_views": lambda tensors: {
        n: t.T.contiguous().T if t.ndim == 2 else t for n, t in tensors.items()
    },
    "state_dict": lambda tensors: {"state_dict": tensors, "epoch": 3, "size": torch.Size([3, 4])},
    "nested": lambda tensors: {"state_dict": {"model": dict(tensors)}, "loss": 0.5},
    "module": lambda tensors: {"module": dict(tensors), "global_steps": 7},
    "numbers_beside": lambda tensors: {**tensors, "steps": 3, "name": "x", "shape": torch.Size([1])},
}


@pytest.mark.parametrize("kind", list(HARMLESS))
def test_unusual_but_harmless_pickles_give_the_values_of_their_safetensors_twin(
    models: Path, tmp_path: Path, kind: str
) -> None:
    tensors = tensors_in(models / "one")

    folder = pickled(tmp_path / "one", models, HARMLESS[kind](tensors))

    assert same(merged_with(models, folder, tmp_path / "out"), tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pickled_halves_keep_their_values(models: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    halves = {name: tensor.to(dtype) for name, tensor in tensors_in(models / "one").items()}

    folder = pickled(tmp_path / "one", models, halves)

    wanted = {name: tensor.float() for name, tensor in halves.items()}
    assert same(merged_with(models, folder, tmp_path / "out"), wanted)


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        ({"args": argparse.Namespace(lr=1)}, "argparse.Namespace"),
        ({"step": np.float64(3.0)}, "numpy"),
        ({"history": np.ones(3)}, "numpy"),
    ],
)
def test_what_lies_beside_the_weights_and_needs_code_is_named(
    models: Path, tmp_path: Path, beside: dict[str, Any], named: str
) -> None:
    folder = pickled(tmp_path / "one", models, {"model": tensors_in(models / "one"), **beside})

    with pytest.raises(CheckpointError, match=named) as caught:
        Pipeline.from_spec(spec_of(models / "base", {"one": folder})).validate()
    assert "safetensors" in str(caught.value)


def test_a_stale_second_copy_is_ignored_named_once_and_not_hashed(models: Path, tmp_path: Path) -> None:
    folder = saved(expert(llama(), 1), tmp_path / "one")
    torch.save(
        {name: tensor + 1 for name, tensor in tensors_in(folder).items()}, folder / "pytorch_model.bin"
    )
    save_file({"stray": torch.ones(2)}, folder / "extra.safetensors")

    merged = run(tmp_path / "out", spec_of(models / "base", {"one": folder}, AVERAGE))

    assert same(tensors_in(merged), tensors_in(models / "one"))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    told = [note for note in report["warnings"] if "pytorch_model.bin" in note]
    assert len(told) == 1
    assert "extra.safetensors" in told[0]
    files = json.loads((merged / "manifest.json").read_text())["inputs"]['expert "one"']["files"]
    kept = (folder / "model.safetensors").read_bytes()
    assert files["model.safetensors"]["sha256"] == hashlib.sha256(kept).hexdigest()
    assert not {"pytorch_model.bin", "extra.safetensors"} & files.keys()


def test_a_prefix_of_older_releases_and_a_whole_clip_model_meet_a_tower_of_today(tmp_path: Path) -> None:
    base = clip_tower()
    saved(base, tmp_path / "base")
    one = tensors_in(saved(expert(base, 1), tmp_path / "one"))
    rewritten(tmp_path / "one", {f"vision_model.{name}": tensor for name, tensor in one.items()})
    other = expert(base, 2)
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = base.config.to_dict()
    whole = hf.CLIPModel(hf.CLIPConfig(text_config={**text, "vocab_size": 99}, vision_config=vision))
    whole.vision_model.load_state_dict(other.state_dict(), strict=False)
    two = {name.removeprefix("vision_model."): t for name, t in whole.vision_model.state_dict().items()}
    saved(whole, tmp_path / "two")

    merged = run(
        tmp_path / "out", spec_of(tmp_path / "base", {"one": tmp_path / "one", "two": tmp_path / "two"})
    )

    start = tensors_in(tmp_path / "base")
    oracle = added_up(start, [one, {name: two[name] for name in start}], 0.3)
    found = tensors_in(merged)
    assert found.keys() == start.keys()
    assert all(torch.allclose(found[name].double(), oracle[name], atol=1e-6) for name in oracle)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "net."])
def test_what_training_tools_put_before_names_is_taken_off_and_said(
    models: Path, tmp_path: Path, wrapper: str
) -> None:
    tensors = tensors_in(saved(expert(llama(), 1), tmp_path / "one"))
    rewritten(tmp_path / "one", {f"{wrapper}{name}": tensor for name, tensor in tensors.items()})

    assert same(merged_with(models, tmp_path / "one", tmp_path / "out"), tensors)
    by_the_class = wrapper == "model."  # which transformers itself takes off
    assert by_the_class or "which a training tool has put before them" in notes_of(models, tmp_path / "one")


def test_blocks_that_were_compiled_one_by_one_are_found(models: Path, tmp_path: Path) -> None:
    tensors = tensors_in(saved(expert(llama(), 1), tmp_path / "one"))
    inner = {name.replace("layers.0.", "layers.0._orig_mod."): tensor for name, tensor in tensors.items()}
    rewritten(tmp_path / "one", inner)

    assert same(merged_with(models, tmp_path / "one", tmp_path / "out"), tensors)


def test_a_base_saved_by_a_training_tool_gives_results_that_load(models: Path, tmp_path: Path) -> None:
    base = saved(llama(), tmp_path / "base")
    rewritten(base, {f"module.{name}": tensor for name, tensor in tensors_in(base).items()})

    merged = run(tmp_path / "out", spec_of(base, {"one": models / "one"}, AVERAGE))

    assert same(tensors_in(merged), tensors_in(models / "one"))


def test_an_unknown_prefix_shows_names_of_both_sides_and_what_differs(models: Path, tmp_path: Path) -> None:
    tensors = tensors_in(saved(expert(llama(), 1), tmp_path / "one"))
    rewritten(tmp_path / "one", {f"my_model.{name}": tensor for name, tensor in tensors.items()})

    with pytest.raises(CheckpointError) as caught:
        Pipeline.from_spec(spec_of(models / "base", {"one": tmp_path / "one"})).validate()

    assert 'begin with "my_model."' in str(caught.value)
    names = ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight")
    assert all(f" {name}" in str(caught.value) for name in names)
    assert all(f" my_model.{name}" in str(caught.value) for name in names)


def test_mismatched_tensors_of_all_experts_are_listed_and_nothing_is_filled_in(
    models: Path, tmp_path: Path
) -> None:
    saved(resized(expert(llama(), 1), 70), tmp_path / "larger")
    lacking = tensors_in(saved(expert(llama(), 2), tmp_path / "lacking"))
    del lacking["model.layers.0.self_attn.q_proj.weight"]
    rewritten(tmp_path / "lacking", lacking)
    spec = spec_of(models / "base", {name: tmp_path / name for name in ("larger", "lacking")})

    with pytest.raises(CheckpointError) as caught:
        Pipeline.from_spec(spec).run(tmp_path / "out")

    text = str(caught.value)
    assert "70 rows, the base's 64" in text
    assert "1 of 21 tensors of the base are missing: model.layers.0.self_attn.q_proj.weight" in text
    assert not (tmp_path / "out" / "merged").exists()


@pytest.mark.parametrize(
    ("name", "packed", "settings", "words"),
    [
        (
            "self_attn.q_proj.weight",
            torch.uint8,
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "4 bits",
        ),
        ("self_attn.q_proj.weight", torch.int8, None, "int8"),
        ("self_attn.q_proj.qweight", torch.int32, {"quant_method": "gptq", "bits": 4}, "gptq, 4 bits"),
        ("self_attn.q_proj.qweight", torch.int32, None, "int32"),
        ("self_attn.q_proj.weight_packed", torch.int32, {"quant_method": "compressed-tensors"}, "compressed"),
        ("self_attn.q_proj.SCB", torch.int8, None, "int8"),
        ("self_attn.q_proj.weight", torch.float8_e4m3fn, {"quant_method": "fp8"}, "fp8"),
    ],
)
@pytest.mark.parametrize("role", ["base", "expert"])
def test_packed_weights_are_refused_by_format_and_tensor(
    models: Path, tmp_path: Path, name: str, packed: torch.dtype, settings: Any, words: str, role: str
) -> None:
    folder = saved(expert(llama(), 1), tmp_path / "packed")
    tensors = tensors_in(folder)
    weight = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    rewritten(folder, {**tensors, f"model.layers.0.{name}": weight.to(packed)})
    if settings is not None:
        change_config(folder, quantization_config=settings)
    spec = (
        spec_of(models / "base", {"one": folder})
        if role == "expert"
        else spec_of(folder, {"one": models / "one"})
    )

    with pytest.raises(MergingError) as caught:
        Pipeline.from_spec(spec).validate()

    assert "quantised" in str(caught.value)
    assert words in str(caught.value)
    assert f"model.layers.0.{name}" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_config_that_says_quantised_over_plain_weights_is_told_and_not_passed_on(
    models: Path, tmp_path: Path
) -> None:
    base = saved(llama(), tmp_path / "base")
    change_config(base, quantization_config={"quant_method": "gptq", "bits": 4})
    spec = spec_of(base, {"one": models / "one"}, AVERAGE)

    told = "\n".join(Pipeline.from_spec(spec).validate())
    merged = run(tmp_path / "out", spec)

    assert "its config says quantised (gptq, 4 bits), its weights are not" in told
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    hf.AutoModelForCausalLM.from_pretrained(merged)


@pytest.mark.parametrize("in_folder", [True, False])
def test_gguf_is_refused_with_the_command_that_unpacks_it(
    models: Path, tmp_path: Path, in_folder: bool
) -> None:
    (tmp_path / "one").mkdir()
    file = tmp_path / "one" / "model-q4.gguf"
    file.write_bytes(b"GGUF" + bytes(100))

    with pytest.raises(CheckpointError) as caught:
        Pipeline.from_spec(spec_of(models / "base", {"one": file.parent if in_folder else file})).validate()

    text = str(caught.value)
    assert "GGUF" in text
    assert f'from_pretrained("{file.parent}", gguf_file="model-q4.gguf")' in text
    assert "save_pretrained" in text


DAMAGED = {
    "empty": (b"", "is empty"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-LFS pointer"),
    "page": (b"<!DOCTYPE html><html><body>401 Unauthorized</body></html>" * 3, "is a web page"),
}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", [*DAMAGED, "cut"])
def test_each_way_a_download_fails_has_its_own_words(
    models: Path, tmp_path: Path, kind: str, name: str
) -> None:
    (tmp_path / "one").mkdir()
    file = tmp_path / "one" / name
    if kind == "cut":
        if name.endswith(".bin"):
            torch.save(tensors_in(models / "one"), file)
        else:
            file.write_bytes((models / "one" / "model.safetensors").read_bytes())
        os.truncate(file, file.stat().st_size // 2)
        words = "truncated"
    else:
        content, words = DAMAGED[kind]
        file.write_bytes(content)

    with pytest.raises(CheckpointError, match=words) as caught:
        Pipeline.from_spec(spec_of(models / "base", {"one": tmp_path / "one"})).validate()
    assert str(file) in str(caught.value)


def test_an_index_of_an_earlier_upload_names_the_files_that_are_gone(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    expert(llama(), 1).save_pretrained(folder, max_shard_size="20KB")
    next(folder.glob("model-00002-*")).unlink()

    with pytest.raises(CheckpointError, match=r"model-00002.*is not there"):
        Pipeline.from_spec(spec_of(models / "base", {"one": folder})).validate()


@pytest.mark.parametrize("name", ["run+1", "exp@v2", "my model", "日本", "x" * 200])
def test_any_folder_name_works_for_base_expert_and_adapter(models: Path, tmp_path: Path, name: str) -> None:
    saved(llama(), tmp_path / "b" / name)
    saved(expert(llama(), 1), tmp_path / "e" / name)
    adapted(llama(), tmp_path / "a" / name, target_modules=["q_proj"])
    experts = {"one": tmp_path / "e" / name, "two": {"adapter": str(tmp_path / "a" / name)}}

    merged = run(tmp_path / "out", spec_of(tmp_path / "b" / name, experts))

    assert tensors_in(merged).keys() == tensors_in(models / "base").keys()


def test_a_misspelt_path_is_answered_at_once_without_the_network(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("the network was tried")

    monkeypatch.setattr(socket.socket, "connect", refused)
    start = time.monotonic()

    with pytest.raises(MergingError, match="no such folder") as caught:
        Pipeline.from_spec(spec_of(models / "base", {"one": str(models / "onne")})).validate()

    assert time.monotonic() - start < 1
    assert f"{models / 'one'}" in str(caught.value)
