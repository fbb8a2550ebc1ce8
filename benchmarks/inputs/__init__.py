"""The inputs of all tables, drawn from seeds, made once and kept in one folder.

INPUTS/llama1b/     base, expert1..3                1.1 B parameters each, bf16
INPUTS/clip_b32/    base, task0..7, px0..7          ViT-B/32, float32; 256 pictures a task
INPUTS/peft/        base, a0..a2                    a small Llama, rank-16 adapters
INPUTS/llama8b_4/   base, expert1..3, tokens1..3    blocks of Llama-3.1-8B's shape, 64 x 256 tokens a task
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import children
from benchmarks.measure import BenchmarkError
from benchmarks.shapes import ClipVision, Llama

TINY_LLAMA, VIT_B_32 = Llama(), ClipVision()
SMALL_LLAMA = Llama(1024, 8, 2816, 16, 16, 8000, "float32")
LLAMA_8B = Llama(4096, 4, 14336, 32, 8, 32000)


@dataclass(frozen=True)
class Texts:
    """A base, experts 1..n, and for each expert a file of token ids where `sequences` says so."""

    shape: Llama = TINY_LLAMA
    experts: int = 3
    sequences: int = 0
    length: int = 0
    files: str = "weights"  # or "headers": shards without data, for what reads no weights


@dataclass(frozen=True)
class Pictures:
    """A base, experts task0..n-1, and a file of pictures for each."""

    shape: ClipVision = VIT_B_32
    tasks: int = 8
    images: int = 256


@dataclass(frozen=True)
class Adapters:
    """A base and PEFT LoRA adapters a0..n-1 on all its linears; alpha is twice the rank."""

    shape: Llama = SMALL_LLAMA
    adapters: int = 3
    rank: int = 16


Inputs = Texts | Pictures | Adapters
TOY_LLAMA = Llama(64, 2, 128, 4, 2, 96)
TOY_CLIP = ClipVision(32, 2, 64, 4, 8, 32)

LLAMA_1B, TOY_1B = Texts(), Texts(TOY_LLAMA)
CLIP_B32, TOY_B32 = Pictures(), Pictures(TOY_CLIP, tasks=3, images=12)
PEFT, TOY_PEFT = Adapters(), Adapters(replace(TOY_LLAMA, dtype="float32"), rank=4)
LLAMA_8B_BLOCKS = Texts(LLAMA_8B, sequences=64, length=256)
TOY_8B_BLOCKS = Texts(TOY_LLAMA, sequences=4, length=8)

PRESETS: dict[str, tuple[Inputs, Inputs]] = {  # the real ones, and toys
    "llama1b": (LLAMA_1B, TOY_1B),
    "clip_b32": (CLIP_B32, TOY_B32),
    "peft": (PEFT, TOY_PEFT),
    "llama8b_4": (LLAMA_8B_BLOCKS, TOY_8B_BLOCKS),
}


def named(name: str, *, toy: bool) -> str:
    """Of the folder: toy inputs never take the place of the real ones."""
    return f"{name}_toy" if toy else name


def at_hand(folder: Path, inputs: Inputs) -> Path:
    """The folder of these inputs; made now, in a process of its own, if it is not there."""
    if not folder.exists():
        asked = {"kind": type(inputs).__name__, **asdict(inputs)}
        print(f"making {folder}", file=sys.stderr, flush=True)
        children.ask("benchmarks.inputs.write", str(folder), json.dumps(asked))
    config = json.loads((folder / "base" / "config.json").read_text(encoding="utf-8"))
    wanted = inputs.shape.config()
    sizes = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    if differing := [name for name in sizes if config[name] != wanted[name]]:
        raise BenchmarkError(
            f"{folder} holds other inputs: {differing[0]} is {config[differing[0]]}, "
            f"wanted {wanted[differing[0]]}; remove the folder or name another with --inputs"
        )
    return folder


def from_json(text: str) -> Inputs:
    asked: dict[str, Any] = json.loads(text)
    kind, shape = asked.pop("kind"), asked.pop("shape")
    if kind == "Pictures":
        return Pictures(ClipVision(**shape), **asked)
    return {"Texts": Texts, "Adapters": Adapters}[kind](Llama(**shape), **asked)
