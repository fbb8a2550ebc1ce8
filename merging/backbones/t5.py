"""T5 and its kin: encoder and decoder, each with a mask of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from merging.backbones.pretrained import TransformersBackbone
from merging.contracts.backbone import Batch

if TYPE_CHECKING:
    from torch import Tensor

_IGNORED = -100  # labels that no loss is taken of


class T5(TransformersBackbone):
    """T5, Flan-T5, mT5, UL2 and UMT5, whole or the encoder alone.

    Cross-attention's keys and values weigh the encoder's tokens, all else in the decoder its own, by
    `decoder_attention_mask` or else by `labels`."""

    model_types = frozenset({"t5", "mt5", "umt5"})

    def forward_kwargs(self, batch: Batch) -> dict[str, Any]:
        kwargs = super().forward_kwargs(batch)
        if "labels" in batch and "decoder_input_ids" not in batch:
            kwargs.pop("decoder_input_ids", None)  # the model makes them from the labels
        return kwargs

    def token_weights(
        self, batch: Batch, stack: str, module: str, tokens: tuple[int, ...], last: bool
    ) -> Tensor | None:
        labels_BT = batch.get("labels")
        if labels_BT is not None and "decoder_attention_mask" not in batch:
            batch = {**batch, "decoder_attention_mask": (labels_BT != _IGNORED).long()}
        return super().token_weights(batch, stack, module, tokens, last)
