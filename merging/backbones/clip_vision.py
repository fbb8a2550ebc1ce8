"""CLIP's vision tower."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from merging.backbones.class_token import class_token_weights
from merging.backbones.pretrained import TransformersBackbone
from merging.contracts.backbone import Batch

if TYPE_CHECKING:
    from torch import Tensor, nn


class ClipVision(TransformersBackbone):
    """CLIP's vision tower (CLIPVisionModel, with or without projection, or the tower of a whole
    CLIPModel)."""

    model_types = frozenset({"clip_vision_model", "clip"})
    outer_patterns = ("text_model.*", "text_projection.*", "visual_projection.*", "logit_scale")

    def model_class(self) -> Any:
        import transformers

        if self.config.model_type == "clip":
            return transformers.CLIPVisionModelWithProjection
        return super().model_class()

    def model_config(self) -> Any:
        if self.config.model_type != "clip":
            return self.config
        vision = self.config.vision_config
        vision.projection_dim = self.config.projection_dim
        return vision

    def stacks(self, model: nn.Module) -> tuple[str, ...]:
        found = super().stacks(model)
        return tuple(name for name in found if "text_model" not in name)

    def token_weights(
        self, batch: Batch, stack: str, module: str, tokens: tuple[int, ...], last: bool
    ) -> Tensor | None:
        return class_token_weights(module, tokens) if last else None

    def features(self, output: Any, batch: Batch) -> Tensor:
        projected = getattr(output, "image_embeds", None)
        return output.pooler_output if projected is None else projected
