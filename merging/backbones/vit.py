"""ViT and DINOv2, with or without classifier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from merging.backbones.class_token import class_token_weights
from merging.backbones.pretrained import TransformersBackbone
from merging.contracts.backbone import Batch
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor, nn


class ViT(TransformersBackbone):
    """ViT and DINOv2 (with registers, too), with or without a classifier."""

    unread_patterns = ("*pooler.*",)  # heads read the tokens, not what the pooler makes of them
    model_types = frozenset({"vit", "dinov2", "dinov2_with_registers", "deit"})

    class Settings(BaseSettings):
        features: Literal["auto", "cls", "cls_and_mean"] = Field(
            "auto",
            description="What heads read: the class token, or beside it the mean of the patches; "
            "auto: what the model class's own classifier reads.",
        )

    @property
    def _reads_patches(self) -> bool:
        if self.settings.features != "auto":
            return bool(self.settings.features == "cls_and_mean")
        return "Dinov2" in self.architecture() and self.architecture().endswith("ForImageClassification")

    def token_weights(
        self, batch: Batch, stack: str, module: str, tokens: tuple[int, ...], last: bool
    ) -> Tensor | None:
        return class_token_weights(module, tokens) if last and not self._reads_patches else None

    def features(self, output: Any, batch: Batch) -> Tensor:
        import torch

        hidden_BTF = output.last_hidden_state
        cls_BF = hidden_BTF[:, 0]
        if not self._reads_patches:
            return cls_BF
        first = 1 + getattr(self.config, "num_register_tokens", 0)
        return torch.cat([cls_BF, hidden_BTF[:, first:].mean(dim=1)], dim=1)

    def skeleton(self) -> nn.Module:
        """Without the classifier: heads are kept per task and read `features`."""
        model = super().skeleton()
        inner: nn.Module = model.base_model  # type: ignore[assignment]
        return inner
