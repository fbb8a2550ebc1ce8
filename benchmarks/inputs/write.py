"""Writes one set of inputs: `python -m benchmarks.inputs.write FOLDER JSON`, a process of its own.

Each tensor is drawn from a seed made of its name and of the model's number, so it does not depend on
others. Experts are the base plus noise, rounded to the stored dtype.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.inputs import Adapters, Inputs, Pictures, Texts, from_json
from benchmarks.shapes import ClipVision, Drawn, Llama

SHARD_BYTES = 500 * 10**6
NOISE = 0.1  # of an expert, relative to each tensor's own deviation
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as safetensors spells them


def write(folder: Path, inputs: Inputs) -> None:
    """All or nothing: the folder gets its name when it is whole."""
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    if isinstance(inputs, Texts):
        _texts(scratch, inputs)
    elif isinstance(inputs, Pictures):
        _pictures(scratch, inputs)
    else:
        _adapters(scratch, inputs)
    scratch.replace(folder)


def _texts(folder: Path, inputs: Texts) -> None:
    names = ["base", *(f"expert{number + 1}" for number in range(inputs.experts))]
    _models(folder, inputs.shape, names, headers_only=inputs.files == "headers")
    for name in names:
        _tokenizer(folder / name, inputs.shape.vocabulary)
    for number in range(1, inputs.experts + 1 if inputs.sequences else 1):
        size = (inputs.sequences, inputs.length)
        ids = torch.randint(3, inputs.shape.vocabulary, size, generator=_generator("tokens", number))
        save_file({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, folder / _tokens(number))


def _pictures(folder: Path, inputs: Pictures) -> None:
    names = ["base", *(f"task{number}" for number in range(inputs.tasks))]
    _models(folder, inputs.shape, names, shard_bytes=2**63)
    for number in range(inputs.tasks):
        pixels = _smooth(inputs.images, inputs.shape.image, _generator("pixels", number))
        save_file({"pixel_values": pixels}, folder / f"px{number}.safetensors")


def _adapters(folder: Path, inputs: Adapters) -> None:
    _models(folder, inputs.shape, ["base"])
    _tokenizer(folder / "base", inputs.shape.vocabulary)
    targets = [name.split(".")[-1] for name in inputs.shape.matrices()]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": inputs.rank,
        "lora_alpha": 2 * inputs.rank,
        "target_modules": targets,
        "bias": "none",
    }
    for number in range(inputs.adapters):
        place = folder / f"a{number}"
        place.mkdir()
        save_file(dict(_factors(inputs, number)), place / "adapter_model.safetensors", {"format": "pt"})
        (place / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _factors(inputs: Adapters, number: int) -> Iterator[tuple[str, Tensor]]:
    for layer in range(inputs.shape.layers):
        for name, (outputs, features) in inputs.shape.matrices().items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            for factor, shape in (("A", (inputs.rank, features)), ("B", (outputs, inputs.rank))):
                stored = f"{module}.lora_{factor}.weight"
                yield stored, 0.02 * torch.randn(shape, generator=_generator(stored, number))


def _models(
    folder: Path,
    shape: Llama | ClipVision,
    names: Sequence[str],
    *,
    shard_bytes: int = SHARD_BYTES,
    headers_only: bool = False,
) -> None:
    """Models of one shape; the first is the base. One shard of two models is held at a time."""
    dtype, size = getattr(torch, shape.dtype), _BYTES[shape.dtype]
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
    shards = _shards(list(shape.tensors()), size, shard_bytes)
    files = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    files = ["model.safetensors"] if len(files) == 1 else files
    for file, shard in zip(files, shards, strict=True):
        base = {} if headers_only else {one.name: _drawn(one, dtype) for one in shard}
        for number, name in enumerate(names):
            if headers_only:
                _header(folder / name / file, shard, shape.dtype)
            else:
                tensors = {
                    one.name: _noisy(base[one.name], one, number) if number else base[one.name]
                    for one in shard
                }
                save_file(tensors, folder / name / file, {"format": "pt"})
    if len(files) > 1:
        places = {one.name: file for file, shard in zip(files, shards, strict=True) for one in shard}
        total = sum(size * math.prod(one.shape) for shard in shards for one in shard)
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": places})
        for name in names:
            (folder / name / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def _shards(tensors: Sequence[Drawn], size: int, most: int) -> list[list[Drawn]]:
    shards: list[list[Drawn]] = [[]]
    used = 0
    for one in tensors:
        bytes_of_one = size * math.prod(one.shape)
        if shards[-1] and used + bytes_of_one > most:
            shards.append([])
            used = 0
        shards[-1].append(one)
        used += bytes_of_one
    return shards


def _header(file: Path, shard: Sequence[Drawn], dtype: str) -> None:
    """A shard with its header and a hole for data: it takes no room on the disk."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in shard:
        start, end = end, end + _BYTES[dtype] * math.prod(one.shape)
        header[one.name] = {"dtype": _NAMES[dtype], "shape": one.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def _drawn(one: Drawn, dtype: torch.dtype) -> Tensor:
    if one.deviation is None:
        return torch.ones(one.shape, dtype=dtype)
    return torch.randn(one.shape, generator=_generator(one.name, 0)).mul_(one.deviation).to(dtype)


def _noisy(base: Tensor, one: Drawn, number: int) -> Tensor:
    noise = torch.randn(one.shape, generator=_generator(one.name, number))
    return noise.mul_(NOISE * (one.deviation or 0.1)).add_(base).to(base.dtype)


def _smooth(images: int, size: int, generator: torch.Generator) -> Tensor:
    """Smooth fields with a little noise, so that tokens differ from each other as in photographs."""
    coarse = torch.randn(images, 3, max(2, size // 16), max(2, size // 16), generator=generator)
    fields = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
    return fields + 0.3 * torch.randn(fields.shape, generator=generator)


def _generator(name: str, number: int) -> torch.Generator:
    return torch.Generator().manual_seed((zlib.crc32(name.encode()) << 8) + number)


def _tokens(number: int) -> str:
    return f"tokens{number}.safetensors"


def _tokenizer(folder: Path, vocabulary: int) -> None:
    """One token a word: w3, w4, ..."""
    special = {"<unk>": 0, "<s>": 1, "</s>": 2}
    added = [
        {"id": number, "content": token, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token, number in special.items()
    ]
    words = special | {f"w{number}": number for number in range(3, vocabulary)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>"}
    text = json.dumps({**config, "eos_token": "</s>"})
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def main(words: Sequence[str]) -> None:
    folder = Path(words[0])
    folder.parent.mkdir(parents=True, exist_ok=True)
    write(folder, from_json(words[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
