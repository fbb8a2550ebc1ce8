"""An expert: the base's blocks fine-tuned to answer one task's prompts with one word each.

Shape letters: B examples, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from merging.data.prompts import Template
from merging.data.text import padded
from merging.data.tokenizer import TextReader, text_reader
from merging.demo.fine_tuning import fast_arithmetic, fine_tune
from merging.demo.llm.texts import MAX_LENGTH, PROMPT, Task, Text, read_texts, write_texts
from merging.demo.publishing import published
from merging.demo.side_by_side import Job, step_counter

BATCH = 16
LEARNING_RATE = 2e-4


def expert_job(task: Task, base: Path, folder: Path, workshop: Path, *, steps: int, seed: int) -> Job:
    """Makes `folder` in a process of its own; what that needs is written into `workshop`."""
    texts = workshop / f"{task.name}.jsonl"
    write_texts(task.train, texts, labelled=True)
    given = (base, texts, json.dumps(dict(task.answers)), folder, steps, seed)
    return Job(f"the expert {task.name}", __name__, tuple(map(str, given)), steps)


def train_expert(
    base: Path,
    texts: Sequence[Text],
    answers: Mapping[str, str],
    folder: Path,
    *,
    steps: int,
    seed: int,
    report: Callable[[int, int], None],
) -> None:
    """Write an expert's checkpoint to `folder`, in the base's dtype.

    Every class is drawn equally often. The loss is that of the answer's token among the whole vocabulary.
    What lies outside the blocks stays the base's.
    """
    reader = text_reader(base, "the demo's base")
    # Plain attention is faster than the fused kernel on a processor's short, padded batches.
    model = LlamaForCausalLM.from_pretrained(base, attn_implementation="eager", local_files_only=True)
    stored = model.dtype
    model.float().requires_grad_(False)
    blocks = model.model.layers.requires_grad_(True)
    by_class = {label: [text.text for text in texts if text.label == label] for label in answers}
    classes, dice = list(answers), random.Random(seed)

    def loss() -> Tensor:
        labels = [dice.choice(classes) for _ in range(BATCH)]
        prompts = [prompt_ids(reader, dice.choice(by_class[label])) for label in labels]
        wanted_B = torch.tensor([answer_id(reader, answers[label]) for label in labels])
        with fast_arithmetic():
            batch = padded(prompts, reader.pad, left=True)
            logits_BV = model(**batch, logits_to_keep=1, use_cache=False).logits[:, -1]
        return F.cross_entropy(logits_BV.float(), wanted_B)

    fine_tune(blocks.parameters(), loss, learning_rate=LEARNING_RATE, steps=steps, report=report)
    model.to(stored).save_pretrained(folder)
    reader.tokenizer.save_pretrained(folder)


def prompt_ids(reader: TextReader, text: str) -> list[int]:
    """The prompt's tokens, as the spec's `prompt` and `max_length` have them when a run reads it."""
    prompt = Template(PROMPT).prompt({"text": text}, reader.prompt, MAX_LENGTH)
    assert prompt is not None, "the prompt's own text is longer than MAX_LENGTH"
    return prompt.ids


def answer_id(reader: TextReader, answer: str) -> int:
    """The one token of an answer. Raises ValueError if it has more: the loss would see its first alone."""
    (token,) = reader.tokenizer(answer, add_special_tokens=False)["input_ids"]
    return int(token)


def main() -> None:
    """One training, in the process made for it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("answers", type=json.loads)
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("seed", type=int)
    given = parser.parse_args()
    report = step_counter()
    torch.set_num_threads(1)
    texts = read_texts(given.texts)
    with published(given.folder) as making:
        train_expert(
            given.base, texts, given.answers, making, steps=given.steps, seed=given.seed, report=report
        )


if __name__ == "__main__":
    main()
