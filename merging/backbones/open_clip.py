"""CLIP models of open_clip: folders with open_clip_config.json, as its save_for_hf and push_to_hf_hub write.

Shape letters: B examples, T tokens, F final feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from merging.backbones.class_token import OTHERS, class_token_weights
from merging.contracts.backbone import Backbone, Batch, Location
from merging.errors import CheckpointError, DataError, TracingError
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

OPEN_CLIP = "open_clip"
_NAMES = {"image": "pixel_values", "text": "input_ids"}  # open_clip's words -> those of the other backbones


@dataclass(frozen=True)
class OpenClipConfig:
    """What open_clip_config.json says."""

    model_cfg: Mapping[str, Any]
    preprocess_cfg: Mapping[str, Any]
    model_type: str = OPEN_CLIP

    @property
    def vision(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.model_cfg["vision_cfg"]
        return found

    @property
    def text(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.model_cfg["text_cfg"]
        return found


class OpenClip(Backbone):
    """CLIP of open_clip: both transformer towers, fused attention calibrated as four linears."""

    model_types = frozenset({OPEN_CLIP})
    weights_file = "open_clip_model.safetensors"  # which open_clip looks for; it reads no shards
    config: OpenClipConfig
    _outline: nn.Module | None = None
    _places: Mapping[str, Location] = {}

    class Settings(BaseSettings):
        split_attention: bool = Field(
            False,
            description="Tensor-wise rules see the fused projection of attention as three matrices (q, k, v) "
            "and not as the one that is stored. Layer-wise methods always solve the three.",
        )

    def skeleton(self) -> nn.Module:
        return deepcopy(self._built())

    def _built(self) -> nn.Module:
        if self._outline is None:
            from accelerate import init_empty_weights

            from merging.backbones.open_clip_towers import CustomTextTowers, Towers
            from merging.backbones.split_attention import split_attention_

            settings = self._offline_settings()
            towers = CustomTextTowers if settings.pop("custom_text", False) else Towers
            try:
                with init_empty_weights(include_buffers=False):
                    model: nn.Module = towers(**settings)
            except (TypeError, ValueError, KeyError, AssertionError) as error:
                raise CheckpointError(
                    f"open_clip cannot build the model of {self.folder}: {error}",
                    remedy="Check model_cfg in open_clip_config.json, or use the release that wrote it.",
                ) from error
            self._places = split_attention_(model)
            self._outline = model.eval().requires_grad_(False)
        return self._outline

    def _offline_settings(self) -> dict[str, Any]:
        """Arguments of the model class. Nothing is downloaded for towers of other libraries."""
        settings: dict[str, Any] = deepcopy(dict(self.config.model_cfg))
        if "multimodal_cfg" in settings:
            raise CheckpointError(f"{self.folder} is a CoCa model of open_clip, which is not supported")
        if name := self.config.text.get("hf_model_name"):
            raise CheckpointError(
                f'the text tower of {self.folder} is "{name}" of transformers, which open_clip downloads',
                remedy="Tensor-wise rules need no config: copy the weights alone into folders of theirs.",
            )
        if self.config.vision.get("timm_model_name"):
            settings["vision_cfg"]["timm_model_pretrained"] = False
        return settings

    def parts(self, names: tuple[str, ...]) -> dict[str, Location]:
        self._built()
        present = set(names)
        return {part: place for part, place in self._places.items() if place.name in present}

    @property
    def merges_parts(self) -> bool:
        return bool(self.settings.split_attention)

    def stacks(self, model: nn.Module) -> tuple[str, ...]:
        text = "text.transformer" if hasattr(model, "text") else "transformer"
        for tower, blocks in (("image", "visual.transformer"), ("text", text)):
            self._refuse_unknown_blocks(model, tower, blocks)
        return "visual.transformer.resblocks", f"{text}.resblocks"

    def _refuse_unknown_blocks(self, model: nn.Module, tower: str, path: str) -> None:
        from open_clip.transformer import ResidualAttentionBlock

        holder, _, leaf = path.rpartition(".")
        stack = getattr(getattr(model.get_submodule(holder), leaf, None), "resblocks", None)
        if stack is None:
            kind = type(model.get_submodule(path.split(".")[0])).__name__
            what = f"is a {kind} of open_clip, which has no stack of transformer blocks"
        elif not isinstance(stack[0], ResidualAttentionBlock):
            what = f"has blocks of the kind {type(stack[0]).__name__}, whose attention cannot be taken apart"
        else:
            return
        raise TracingError(
            f"the {tower} tower of {self.folder} {what}", remedy="Merge it with a tensor-wise rule."
        )

    def sees(self, batch: Batch, stack: str) -> bool:
        wanted = "pixel_values" if _is_visual(stack) else "input_ids"
        return wanted in self.forward_kwargs(batch)

    def forward_kwargs(self, batch: Batch) -> dict[str, Any]:
        kwargs = {_NAMES.get(name, name): value for name, value in batch.items()}
        kwargs.pop("attention_mask", None)  # texts are padded to one length, and their end token ends them
        if not kwargs.keys() & {"pixel_values", "input_ids"}:
            raise DataError(
                f"a batch has neither pixel_values nor input_ids: {', '.join(batch) or 'it is empty'}"
            )
        return kwargs

    def example(self) -> Batch:
        import torch

        model: Any = self._built()
        height, width = model.visual.image_size
        ids = torch.zeros(1, model.context_length, dtype=torch.long)
        return {"pixel_values": torch.zeros(1, 3, height, width), "input_ids": ids}

    def token_weights(
        self, batch: Batch, stack: str, module: str, tokens: tuple[int, ...], last: bool
    ) -> Tensor | None:
        if _is_visual(stack):
            reads_one = self.config.vision.get("pool_type", "tok") == "tok"
            pooled = bool(self.config.vision.get("attentional_pool", False))
            return class_token_weights(module, tokens) if last and reads_one and not pooled else None
        ends_B = self._ends(self.forward_kwargs(batch)["input_ids"])
        return None if ends_B is None else _sentence_weights(ends_B, module, tokens, last)

    def _ends(self, ids_BT: Tensor) -> Tensor | None:
        """Place of each text's end token, which is what is read; None where all tokens are."""
        pool = self.config.text.get("pool_type", "argmax")
        if pool == "argmax":
            return ids_BT.argmax(dim=-1)
        if pool == "eos":
            return (ids_BT == self.config.text.get("eos_id", 2)).int().argmax(dim=-1)
        return None

    def features(self, output: Any, batch: Batch) -> Tensor:
        image, text = output
        found: Tensor = text if image is None else image
        return found

    def how_to_load(self, folder: str) -> str:
        return f'import open_clip\n\nmodel = open_clip.create_model("local-dir:{folder}")'


def filled(model_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """model_cfg with open_clip's defaults, so that two of them can be compared."""
    from dataclasses import asdict

    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    defaults = {"vision_cfg": asdict(CLIPVisionCfg()), "text_cfg": asdict(CLIPTextCfg())}
    towers = {tower: {**values, **model_cfg[tower]} for tower, values in defaults.items()}
    return {"quick_gelu": False, "custom_text": False, **model_cfg, **towers}


def _is_visual(stack: str) -> bool:
    return stack.startswith("visual.")


def _sentence_weights(ends_B: Tensor, module: str, tokens: tuple[int, ...], last: bool) -> Tensor:
    """1 up to the end token and 0 after it; in a last block, the tokens before it weigh less."""
    import torch

    places_T = torch.arange(tokens[1], device=ends_B.device)
    weights_BT = (places_T <= ends_B[:, None]).float()
    if last and module.rpartition(".")[2] not in ("k_proj", "v_proj"):
        weights_BT = torch.where(places_T < ends_B[:, None], OTHERS, weights_BT)
    return weights_BT
