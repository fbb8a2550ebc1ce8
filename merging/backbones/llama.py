"""Llama and the causal language models that are built like it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from merging.backbones.pretrained import TransformersBackbone, last_token
from merging.contracts.backbone import Batch

if TYPE_CHECKING:
    from torch import Tensor, nn


class Llama(TransformersBackbone):
    """Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, Phi and SmolLM3, with or without a head."""

    model_types = frozenset(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "smollm3")
    )

    def skeleton(self) -> nn.Module:
        """Without a classifier: heads are kept per task and read the last token's hidden state."""
        model = super().skeleton()
        if not self._classifies:
            return model
        inner: nn.Module = model.base_model  # type: ignore[assignment]
        return inner

    @property
    def _classifies(self) -> bool:
        return self.architecture().endswith("ForSequenceClassification")

    def features(self, output: Any, batch: Batch) -> Tensor:
        """The last token's logits; without a language model's head its hidden state."""
        logits = getattr(output, "logits", None)
        read = output.last_hidden_state if logits is None else logits
        return last_token(read, batch.get("attention_mask"))
