"""Llama and the causal language models that are built like it."""

from __future__ import annotations

from merging.backbones.pretrained import TransformersBackbone


class Llama(TransformersBackbone):
    """Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, Phi and SmolLM3, with or without a head."""

    model_types = frozenset(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "smollm3")
    )
