"""padding: whether padding beside a text changes what a model makes of it: where places count from a row's
beginning (BART), or where neighbours are mixed without a look at the mask (FNet)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from merging.contracts.backbone import Backbone, Batch
from merging.errors import DataError, Problem, TracingError

if TYPE_CHECKING:
    from torch import Tensor

    from merging.data.task import Examples
    from merging.tracer import Block

MASKS = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}

_PADDING, _WORDS = 5, 11
_MOVED: WeakKeyDictionary[Backbone, dict[tuple[str, bool], bool]] = WeakKeyDictionary()


def moving_problem(backbone: Backbone, examples: Examples) -> Problem | None:
    """Why these examples are not what their texts are one by one; None where they are."""
    padded: dict[tuple[str, bool], int] = {}
    for batch in examples.batches():
        for kind, count in _padded(batch).items():
            padded[kind] = padded.get(kind, 0) + count
    return _problem(backbone, padded, len(examples))


def refuse_moved(backbone: Backbone, batch: Batch) -> None:
    """Raise DataError for a batch in which padding moves a text, or changes it otherwise."""
    padded = _padded(batch)
    if padded and (found := _problem(backbone, padded, len(next(iter(batch.values()))))):
        raise DataError(f"a batch's {found.what}", remedy=found.remedy)


def changed_by_padding(backbone: Backbone, mask: str, *, after: bool) -> bool:
    """Whether the blocks that this mask is for make another thing of a text with padding before it, or after.
    Tried on the first block of each kind, with noise for weights; False where that cannot be tried.
    Remembered."""
    known = _MOVED.setdefault(backbone, {})
    if (mask, after) not in known:
        try:
            known[mask, after] = _changed(backbone, mask, after=after)
        except Exception:  # a library's: a model that does not run so tells of itself when it runs
            known[mask, after] = False
    return known[mask, after]


def _problem(backbone: Backbone, padded: Mapping[tuple[str, bool], int], examples: int) -> Problem | None:
    for (mask, after), count in padded.items():
        if not changed_by_padding(backbone, mask, after=after):
            continue
        told = f"texts ({count} of {examples}) are padded at their {'end' if after else 'beginning'} ({mask})"
        if not after and not changed_by_padding(backbone, mask, after=True):
            remedy = 'Pad them at their end; "text" data is padded so.'
            return Problem(
                "", f"{told}, and this model counts places from there: padding moves the text", remedy
            )
        remedy = 'Give "batch_size": 1, which needs no padding, or use a method that needs no data.'
        return Problem("", f"{told}, and this model mixes padding into what it makes of a text", remedy)
    return None


def _padded(batch: Batch) -> dict[tuple[str, bool], int]:
    """Mask, and whether padding is at the end -> how many texts are padded so; those that are."""
    found = {}
    for mask in MASKS:
        mask_BT = batch.get(mask)
        if mask_BT is None or mask_BT.ndim != 2 or not mask_BT.shape[1]:
            continue
        some_B = (mask_BT != 0).any(dim=1)
        for after, edge in ((False, 0), (True, -1)):
            if count := int(((mask_BT[:, edge] == 0) & some_B).sum()):
                found[mask, after] = count
    return found


def _changed(backbone: Backbone, mask: str, *, after: bool) -> bool:
    import torch

    from merging.records import Records
    from merging.tracer import BlockTracer, blocks_of, hollow, stir_

    try:
        example = backbone.example()
    except TracingError:  # the backbone gives none
        return False
    ids = MASKS[mask]
    if ids not in example:
        return False
    model = hollow(backbone)
    stacks = backbone.stacks(model)
    stack = stacks[0] if ids == "input_ids" else stacks[-1]
    blocks = blocks_of(model, stacks)
    tried = _of_each_kind(blocks)
    inside = tuple(f"{one}." for one in stacks)
    kept = tuple(f"{blocks[place].name}." for place in tried)
    names = [name for name, _ in model.named_parameters()]
    stir_(model, [name for name in names if name.startswith(kept) or not name.startswith(inside)])
    batches = [_batch(backbone, example, ids, mask, padding, after) for padding in (0, _PADDING)]
    tracer = BlockTracer(model, blocks, [backbone.forward_kwargs(one) for one in batches], Records())
    with torch.no_grad():
        for index in tried:
            block = blocks[index]
            calls = [tracer.call(index, batch) for batch in (0, 1)]
            answers = [tracer.run(index, call, {}) for call in calls]
            if block.stack == stack and (
                _differ(calls[0], calls[1], after) or _differ(answers[0], answers[1], after)
            ):
                return True
            for batch in (0, 1):
                tracer.record(index, batch, answers[batch])  # for the next kind, as of any block of the stack
    return False


def _of_each_kind(blocks: Sequence[Block]) -> list[int]:
    """Places of the first blocks of each stack with parameters of other shapes."""
    found: dict[object, int] = {}
    for place, block in enumerate(blocks):
        shapes = tuple((name, tuple(one.shape)) for name, one in block.module.named_parameters())
        found.setdefault((block.stack, shapes), place)
    return sorted(found.values())


def _batch(
    backbone: Backbone, example: Batch, ids: str, mask: str, padding: int, after: bool
) -> dict[str, Tensor]:
    """The same words, with so much padding beside those of `ids`."""
    import torch

    text = backbone.config.get_text_config()
    pad = getattr(text, "pad_token_id", None)
    pad = pad if isinstance(pad, int) and pad >= 0 else 0
    words = torch.tensor([word for word in range(3, text.vocab_size) if word != pad][: 2 * _WORDS : 2])
    ones = torch.ones(len(words), dtype=torch.long)
    sides = (0, padding) if after else (padding, 0)
    found = {**example, **{name: words[None] for name in MASKS.values() if name in example}}
    found[ids] = torch.nn.functional.pad(words, sides, value=pad)[None]
    found[mask] = torch.nn.functional.pad(ones, sides)[None]
    return found


def _differ(alone: Any, padded: Any, after: bool) -> bool:
    """Whether hidden states of the words, the first ones of so many tokens, are others beside padding."""
    import torch
    from torch import Tensor
    from torch.utils import _pytree as pytree

    for one, other in zip(pytree.tree_leaves(alone), pytree.tree_leaves(padded), strict=False):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.ndim == other.ndim == 3):
            continue
        if one.shape[:2] == (1, _WORDS) and other.shape[:2] == (1, _WORDS + _PADDING):
            theirs = other[:, :_WORDS] if after else other[:, _PADDING:]
            return not torch.allclose(one, theirs, rtol=1e-3, atol=1e-3 * float(one.abs().max()))
    return False
