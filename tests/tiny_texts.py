"""Small language models with a tokenizer beside them, saved as users have them, and rows of text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tiny_models import GROUPED, SIZE, expert_of
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from merging.backbones.llama import Llama
from merging.backbones.t5 import T5
from merging.backbones.transformers import AnyTransformers
from merging.data.opening import open_examples
from merging.data.task import Task
from merging.data.text_spec import TextData

WORDS = (
    *("the", "a", "film", "plot", "cast", "song", "book", "was", "is", "very", "not", "quite", "good", "bad"),
    *("fine", "dull", "great", "poor", "long", "short", "warm", "cold", "and", "but", "so", "it", "i", "we"),
    *("saw", "read", "loved", "hated", "liked", "left", "found", "made", "Answer", ":", ".", "neg", "pos"),
    *("awful", "superb", "text"),
)
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
VOCABULARY = 64


def tokenizer(kind: str) -> Any:
    """Words as tokens; as those of T5 (`seq2seq`), Llama (`causal`) and BERT (`encoder`) add their marks."""
    ids = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    assert len(ids) <= VOCABULARY
    made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"seq2seq": "$A </s>", "causal": "<s> $A", "encoder": "<s> $A </s>"}
    used = [("<s>", 1), ("</s>", 2)]
    made.post_processor = processors.TemplateProcessing(single=marks[kind], special_tokens=used)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    marks = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, **marks, vocab_size=VOCABULARY))


def _llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, max_position_embeddings=64, use_cache=True))


def _bert() -> nn.Module:
    return hf.BertModel(hf.BertConfig(**SIZE, vocab_size=VOCABULARY, max_position_embeddings=64))


MAKERS = {"t5": (_t5, "seq2seq"), "llama": (_llama, "causal"), "bert": (_bert, "encoder")}


def saved(folder: Path, name: str, experts: Sequence[str] = (), noise: float = 0.05) -> nn.Module:
    """`folder/base` with its tokenizer, and `folder/EXPERT` of each; returns the base."""
    make, kind = MAKERS[name]
    torch.manual_seed(0)
    base = make().eval()
    base.save_pretrained(folder / "base")
    tokenizer(kind).save_pretrained(folder / "base")
    for seed, expert in enumerate(experts, start=1):
        model = make().eval()
        model.load_state_dict(expert_of(base, seed, noise))
        model.save_pretrained(folder / expert)
    return base


def sentences(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with `text` of unequal lengths and a `label`, neg or pos."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = int(torch.randint(2, 12, (1,), generator=generator))
        picked = torch.randint(0, 40, (length,), generator=generator).tolist()
        rows.append({"text": " ".join(WORDS[word] for word in picked), "label": ("neg", "pos")[number % 2]})
    return rows


def written(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return path


KINDS = ("llama", "t5")  # those that write text


class Workshop:
    """A base, its backbone, and tasks over its texts."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.model = saved(folder, name)
        self.model.config.architectures = [type(self.model).__name__]
        kind = {"llama": Llama, "t5": T5}.get(name, AnyTransformers)
        self.backbone = kind(self.model.config)
        self.tokenizer = tokenizer(MAKERS[name][1])

    def task(self, spec: Any, rows: Any = None, **keys: Any) -> Task:
        path = written(self.folder / "rows.jsonl", sentences(9) if rows is None else rows)
        data = TextData(path=path, prompt="{text}\nAnswer:", batch_size=4, **keys)
        where = {"task": "movie", "base_folder": self.folder / "base", "seed": 0, "labelled": False}
        return Task("movie", test=open_examples(data, purpose="test", **where), metric=spec)

    def log_likelihood(self, prompt: str, answer: str) -> float:
        """By definition: one prompt, one answer, no padding."""
        ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        read = torch.tensor([self.tokenizer(prompt)["input_ids"]])
        with torch.no_grad():
            if self.name == "t5":
                ids = [*ids, 2]
                logits = self.model(input_ids=read, decoder_input_ids=torch.tensor([[0, *ids[:-1]]])).logits[
                    0
                ]
            else:
                whole = torch.cat([read, torch.tensor([ids])], dim=1)
                logits = self.model(whole).logits[0, read.shape[1] - 1 : -1]
        return logits.log_softmax(-1)[range(len(ids)), ids].sum().item()
