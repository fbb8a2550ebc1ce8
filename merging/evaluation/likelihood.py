"""Log-likelihoods of answers under a model that writes text, as few forward passes as there are batches.

Shape letters: R rows of a forward, K tokens, V vocabulary, N answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from merging.contracts.backbone import Backbone
from merging.data.text import padded
from merging.data.tokenizer import TextReader
from merging.evaluation.forward import placed

Ids = Sequence[int]


@torch.no_grad()
def log_likelihoods(
    model: nn.Module,
    backbone: Backbone,
    reader: TextReader,
    prompts: Sequence[Ids],
    answers: Sequence[Sequence[Ids]],
    rows: int,
) -> list[list[float]]:
    """For each prompt the summed log-probability of each of its answers' tokens.

    Answers that differ in their last token only are read off one row: an answer's last token is never an
    input. At most `rows` go through the model at once.
    """
    model.eval()
    wanted: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = {}
    for number, of_prompt in enumerate(answers):
        for place, answer in enumerate(of_prompt):
            wanted.setdefault((number, tuple(answer[:-1])), []).append((number, place))
    found = [[0.0] * len(of_prompt) for of_prompt in answers]
    keys = list(wanted)
    walk = _encoder_decoder if reader.kind == "seq2seq" else _causal
    for start in range(0, len(keys), rows):
        some = keys[start : start + rows]
        for key, logits_KV in zip(some, walk(model, backbone, reader, prompts, some), strict=True):
            log_KV = logits_KV.float().log_softmax(-1)
            for number, place in wanted[key]:
                answer_K = torch.tensor(answers[number][place], device=log_KV.device)
                found[number][place] = log_KV.gather(1, answer_K[:, None]).double().sum().item()
    return found


def _causal(
    model: nn.Module,
    backbone: Backbone,
    reader: TextReader,
    prompts: Sequence[Ids],
    keys: Sequence[tuple[int, tuple[int, ...]]],
) -> list[Tensor]:
    """Logits after the prompt and after each token of the answer's beginning (K V), for each key.

    Padded at the front, so that the wanted logits are the last ones of each row.
    """
    batch = padded([[*prompts[number], *begun] for number, begun in keys], reader.pad, left=True)
    most = 1 + max(len(begun) for _, begun in keys)
    kept = {"logits_to_keep": most} if _keeps_logits(model) else {}
    logits_RKV = model(**backbone.forward_kwargs(placed(batch, model)), **kept).logits
    return [row_KV[-1 - len(begun) :] for row_KV, (_, begun) in zip(logits_RKV, keys, strict=True)]


def _encoder_decoder(
    model: nn.Module,
    backbone: Backbone,
    reader: TextReader,
    prompts: Sequence[Ids],
    keys: Sequence[tuple[int, tuple[int, ...]]],
) -> list[Tensor]:
    """The same, each prompt encoded once."""
    numbers = list(dict.fromkeys(number for number, _ in keys))
    encoder: Any = model.get_encoder()  # type: ignore[operator]
    read = placed(padded([prompts[number] for number in numbers], reader.pad), model)
    states = encoder(**read)
    rows = torch.tensor([numbers.index(number) for number, _ in keys], device=states[0].device)
    said = placed(padded([[reader.start or 0, *begun] for _, begun in keys], reader.pad), model)
    states.last_hidden_state = states[0][rows]
    logits_RKV = model(
        encoder_outputs=states,
        attention_mask=read["attention_mask"][rows],
        decoder_input_ids=said["input_ids"],
        decoder_attention_mask=said["attention_mask"],
        use_cache=False,
    ).logits
    return [row_KV[: 1 + len(begun)] for row_KV, (_, begun) in zip(logits_RKV, keys, strict=True)]


def _keeps_logits(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
