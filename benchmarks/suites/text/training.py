"""Training: a base's blocks, or adapters on them, learn to answer prompts with words.

Shape letters: B answers' tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedModel, T5ForConditionalGeneration

from merging.data.prompts import Template
from merging.data.text import padded
from merging.data.tokenizer import TextReader, text_reader
from merging.demo.fine_tuning import fast_arithmetic, fine_tune
from merging.demo.llm.texts import Text, read_texts
from merging.demo.publishing import published
from merging.demo.side_by_side import Job, step_counter

RANK = 16
LINEARS = {
    "t5": ["q", "k", "v", "o", "wi_0", "wi_1", "wo"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
"""Layers that adapters are on, by `model_type`."""

LOOKS = 5
"""How often a training looks at validation texts, at its end above all."""

_LOOKED_AT = 128
_DRAWN_TOGETHER = 8  # batches
_IGNORED = -100  # labels that no loss is taken of
_MODELS: dict[str, type[PreTrainedModel]] = {"t5": T5ForConditionalGeneration, "llama": LlamaForCausalLM}


@dataclass(frozen=True)
class Lesson:
    """One task's part in a training: files of labelled texts, and label -> answer as it follows the prompt.

    Without `answers` a label is its own answer, and texts are drawn as they come; with them, every class
    equally often."""

    prompt: str
    texts: str
    answers: Mapping[str, str] = field(default_factory=dict)
    validation: str = ""


@dataclass(frozen=True)
class Training:
    """`form`: "blocks" (all their weights), "norms" (these, and the norms after the blocks) or "lora"."""

    lessons: tuple[Lesson, ...]
    max_length: int
    steps: int
    batch: int
    learning_rate: float
    form: str = "blocks"
    seed: int = 0


def training_job(
    name: str, training: Training, base: Path, folder: Path, history: Path, workshop: Path
) -> Job:
    """Makes `folder` and the file `history` in a process of its own, told by a file in `workshop`."""
    told = workshop / f"{name.replace(' ', '-')}.json"
    told.write_text(json.dumps(asdict(training)), encoding="utf-8")
    return Job(name, __name__, tuple(map(str, (told, base, folder, history))), training.steps)


def train(
    training: Training, base: Path, folder: Path, report: Callable[[int, int], None]
) -> list[dict[str, float]]:
    """Write a checkpoint, or a PEFT adapter, to `folder`, and return the loss on validation texts by step.

    A step's batch is of one lesson. The loss is that of the answer among the whole vocabulary. Embeddings and
    head stay the base's, and so does the dtype of a checkpoint.
    """
    reader = text_reader(base, "the suite's base")
    model = open_model(base)
    stored = model.dtype
    model.float()
    trained = _prepared(model, training, base.name)
    draws = [_Draws(lesson, reader, training.max_length) for lesson in training.lessons]
    dice = random.Random(training.seed)
    history: list[dict[str, float]] = []
    looks = {round(training.steps * look / LOOKS) for look in range(1, LOOKS + 1)}

    def loss() -> Tensor:
        return answer_loss(trained, reader, dice.choice(draws).batch(training.batch, dice))

    def watch(done: int, total: int) -> None:
        report(done, total)
        if done in looks:
            history.append({"step": done, **_validation_loss(trained, reader, training, draws)})

    fine_tune(
        [weight for weight in trained.parameters() if weight.requires_grad],
        loss,
        learning_rate=training.learning_rate,
        steps=training.steps,
        report=watch,
    )
    if training.form == "lora":
        # Asked for, it would look on the hub for whether the embeddings have grown.
        trained.save_pretrained(folder, save_embedding_layers=False)  # type: ignore[operator]
    else:
        model.to(stored).save_pretrained(folder)
        reader.tokenizer.save_pretrained(folder)
    return history


def open_model(base: Path) -> PreTrainedModel:
    """With plain attention: it is faster than the fused kernel on a processor's short, padded batches."""
    kind = AutoConfig.from_pretrained(base, local_files_only=True).model_type
    opened: PreTrainedModel = _MODELS[kind].from_pretrained(
        base, attn_implementation="eager", local_files_only=True
    )
    return opened


class _Tokens(NamedTuple):
    prompt: list[int]
    answer: list[int]


def answer_loss(model: nn.Module, reader: TextReader, rows: Sequence[_Tokens]) -> Tensor:
    """Mean cross-entropy of the answers' tokens. Raises ValueError if a causal model's answer has more than
    one: the loss would see its first alone."""
    prompts, answers = [row.prompt for row in rows], [row.answer for row in rows]
    with fast_arithmetic():
        if reader.kind == "causal":
            wanted_B = torch.tensor([token for (token,) in answers])
            batch = padded(prompts, reader.pad, left=True)
            logits_BV = model(**batch, logits_to_keep=1, use_cache=False).logits[:, -1]
        else:
            said = padded(answers, reader.pad)
            wanted_B = said["input_ids"].masked_fill(said["attention_mask"] == 0, _IGNORED).flatten()
            heard = padded([[reader.start or 0, *answer[:-1]] for answer in answers], reader.pad)
            batch = {**padded(prompts, reader.pad), "decoder_input_ids": heard["input_ids"]}
            logits_BV = model(**batch, use_cache=False).logits.flatten(0, 1)
    return F.cross_entropy(logits_BV.float(), wanted_B, ignore_index=_IGNORED)


class _Draws:
    """A lesson's texts, tokenised when they are drawn: for several batches at a time, so that those of one
    length come together and little is padded."""

    def __init__(self, lesson: Lesson, reader: TextReader, max_length: int) -> None:
        self.lesson, self.reader, self.max_length = lesson, reader, max_length
        self.template = Template(lesson.prompt)
        texts = read_texts(Path(lesson.texts))
        by_class = {label: [one for one in texts if one.label == label] for label in lesson.answers}
        self.choices = list(by_class.values()) or [texts]
        self.waiting: list[list[_Tokens]] = []

    def batch(self, size: int, dice: random.Random) -> list[_Tokens]:
        if not self.waiting:
            drawn = [dice.choice(dice.choice(self.choices)) for _ in range(size * _DRAWN_TOGETHER)]
            rows = sorted(self.tokens(drawn), key=lambda row: len(row.prompt))
            self.waiting = [rows[start : start + size] for start in range(0, len(rows), size)]
            dice.shuffle(self.waiting)
        return self.waiting.pop()

    def tokens(self, texts: Iterable[Text]) -> list[_Tokens]:
        """Prompts as a run reads them by the spec's `prompt` and `max_length`, and answers."""
        rows = []
        for text in texts:
            prompt = self.template.prompt({"text": text.text}, self.reader.prompt, self.max_length)
            assert prompt is not None, "the prompt's own text is longer than max_length"
            answer = self.reader.answer(prompt, self.lesson.answers.get(text.label, text.label))
            rows.append(_Tokens(prompt.ids, answer))
        return rows


def _validation_loss(
    model: nn.Module, reader: TextReader, training: Training, draws: Sequence[_Draws]
) -> dict[str, float]:
    """Mean over the lessons that have validation texts; nothing where none has."""
    found = []
    for draw in draws:
        if draw.lesson.validation:
            texts = read_texts(Path(draw.lesson.validation))[:_LOOKED_AT]
            parts = [texts[start : start + training.batch] for start in range(0, len(texts), training.batch)]
            with torch.no_grad():
                losses = [answer_loss(model, reader, draw.tokens(part)).item() * len(part) for part in parts]
            found.append(sum(losses) / len(texts))
    return {"loss": sum(found) / len(found)} if found else {}


def _prepared(model: PreTrainedModel, training: Training, base: str) -> nn.Module:
    """The model, or an adapted one around it: what is to be trained requires gradients, and only that."""
    model.requires_grad_(False)
    kind = model.config.model_type
    if training.form == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LINEARS[kind])
        model.name_or_path = f"models/{base}"  # what the adapter says that it is for
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(training.seed)
            adapted: nn.Module = get_peft_model(model, config)
        return adapted
    for stack in _stacks(model):
        stack["blocks"].requires_grad_(True)
        if training.form == "norms":
            stack["norm"].requires_grad_(True)
    return model


def _stacks(model: Any) -> list[dict[str, nn.Module]]:
    if model.config.model_type == "t5":
        return [{"blocks": one.block, "norm": one.final_layer_norm} for one in (model.encoder, model.decoder)]
    return [{"blocks": model.model.layers, "norm": model.model.norm}]


def main() -> None:
    """One training, in the process made for it."""
    parser = argparse.ArgumentParser()
    for name in ("told", "base", "folder", "history"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    told: dict[str, Any] = json.loads(given.told.read_text(encoding="utf-8"))
    training = Training(**{**told, "lessons": tuple(Lesson(**lesson) for lesson in told["lessons"])})
    report = step_counter()
    torch.set_num_threads(1)
    with published(given.folder) as making:
        history = train(training, given.base, making, report)
        with published(given.history) as file:
            file.write_text(json.dumps(history, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
