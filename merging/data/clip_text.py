"""TextTower: the text tower of a whole CLIP, of transformers or of open_clip, with its tokenizer.

Shape letters: B texts, T tokens, F final feature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from merging.backbones.open_clip import OpenClip, OpenClipConfig
from merging.checkpoints.config_bounds import refuse_unbounded
from merging.checkpoints.folder import config as read_config
from merging.checkpoints.folder import open_checkpoint, open_clip_config
from merging.data.tokenizer import has_tokenizer
from merging.errors import DataError
from merging.libraries import reading_with


class TextTower(ABC):
    """Weights are read when a text is first embedded."""

    features: int  # F

    @abstractmethod
    def embed(self, texts: Sequence[str]) -> Tensor:
        """Projected embeddings (B F), not normalised."""

    @abstractmethod
    def scale(self) -> Tensor:
        """What CLIP multiplies cosines with: exp(logit_scale)."""


def text_tower(folder: Path, where: str) -> TextTower:
    """Raises DataError for a folder that is no whole CLIP with a tokenizer."""
    found = open_clip_config(folder)
    if found is not None:
        refuse_unbounded(folder / "open_clip_config.json", found, folder)
        return _OpenClipText(folder, OpenClipConfig(**found), where)
    if (read_config(folder) or {}).get("model_type") == "clip":
        return _TransformersText(folder, where)
    raise DataError(
        f"{where}: {folder} is no whole CLIP with a text tower (a CLIPModel of transformers, or open_clip's)",
        remedy='Give the CLIP that the base is a part of: "head": {"type": "zero_shot", "model": "..."}.',
    )


class _TransformersText(TextTower):
    def __init__(self, folder: Path, where: str) -> None:
        from transformers import AutoConfig, AutoTokenizer

        if not has_tokenizer(folder):
            raise DataError(
                f"{where}: the CLIP in {folder} has no tokenizer",
                remedy="Copy tokenizer.json or vocab.json and merges.txt from where it comes from.",
            )
        self._folder = folder
        refuse_unbounded(folder / "config.json", read_config(folder) or {}, folder)
        with reading_with(DataError, f"{where}: the CLIP in {folder} cannot be used"):
            whole: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.config = whole.text_config
        self.config.projection_dim = self.features = int(whole.projection_dim)
        self.config.architectures = ["CLIPTextModelWithProjection"]
        _refuse_larger(len(self._tokenizer), int(self.config.vocab_size), folder, where)

    @cached_property
    def _model(self) -> nn.Module:
        from merging.backbones.transformers import AnyTransformers
        from merging.streaming import load_model

        return load_model(AnyTransformers(self.config, folder=self._folder), open_checkpoint(self._folder))

    def embed(self, texts: Sequence[str]) -> Tensor:
        length = int(self.config.max_position_embeddings)
        batch = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        found: Tensor = self._model(**inputs).text_embeds
        return found

    def scale(self) -> Tensor:
        return open_checkpoint(self._folder).read("logit_scale").float().exp()


class _OpenClipText(TextTower):
    def __init__(self, folder: Path, config: OpenClipConfig, where: str) -> None:
        import open_clip

        self._folder, self.features = folder, int(config.model_cfg["embed_dim"])
        self._backbone = OpenClip(config, folder=folder)
        if config.text.get("hf_tokenizer_name") and not has_tokenizer(folder):
            raise DataError(
                f"{where}: {folder} has no tokenizer, which its config says it has",
                remedy="Copy the tokenizer's files from where it comes from.",
            )
        try:
            self._tokenizer: Any = open_clip.get_tokenizer(f"local-dir:{folder}")
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise DataError(f"{where}: the tokenizer of {folder} cannot be used: {error}") from error
        size = getattr(self._tokenizer, "vocab_size", None) or len(self._tokenizer.tokenizer)
        _refuse_larger(int(size), int(config.text.get("vocab_size", 49408)), folder, where)

    @cached_property
    def _model(self) -> Any:
        from merging.streaming import load_model

        return load_model(self._backbone, open_checkpoint(self._folder))

    def embed(self, texts: Sequence[str]) -> Tensor:
        found: Tensor = self._model.encode_text(self._tokenizer(list(texts)))
        return found

    def scale(self) -> Tensor:
        found: Tensor = open_checkpoint(self._folder).read("logit_scale").float().exp()
        return found.reshape(())


def _refuse_larger(tokens: int, rows: int, folder: Path, where: str) -> None:
    if tokens > rows:
        raise DataError(
            f"{where}: the tokenizer of {folder} has {tokens} tokens, the text tower {rows} embeddings",
            remedy="Use the tokenizer that the model was trained with.",
        )
