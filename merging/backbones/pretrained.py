"""TransformersBackbone: what all models of transformers have in common, read from the checkpoint's config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from merging.contracts.backbone import Backbone, Batch
from merging.errors import CheckpointError, DataError, TracingError

if TYPE_CHECKING:
    from torch import Tensor, nn

_CROSS_ATTENTION = ("EncDecAttention", "encoder_attn", "crossattention", "cross_attn")
_KEYS_AND_VALUES = ("k", "v", "k_proj", "v_proj", "key", "value")


class TransformersBackbone(Backbone):
    """A model class of transformers, named by `architectures` in config.json; blocks are found by
    inspection."""

    head_patterns: ClassVar[tuple[str, ...]] = ("classifier.*", "score.*", "qa_outputs.*")
    _outline: nn.Module | None = None  # a skeleton kept to ask for names

    def architecture(self) -> str:
        names = getattr(self.config, "architectures", None) or ()
        if not names:
            raise CheckpointError(
                f'the config of {self.folder or "the base"} has no "architectures", so no model class',
                remedy="Save the base with transformers' save_pretrained, which writes it.",
            )
        return str(names[0])

    def model_class(self) -> Any:
        import transformers

        name = self.architecture()
        found = getattr(transformers, name, None)
        if found is None:
            raise CheckpointError(
                f"the config names a model class that transformers {transformers.__version__} lacks: {name}",
                remedy="Use a transformers release that has it; code inside checkpoints is never run.",
            )
        return found

    def model_config(self) -> Any:
        """The config from which the model class is built."""
        return self.config

    def skeleton(self) -> nn.Module:
        from accelerate import init_empty_weights
        from transformers.initialization import no_init_weights

        with no_init_weights(), init_empty_weights(include_buffers=False):
            model: nn.Module = self.model_class()(self.model_config())
        model.eval()
        model.requires_grad_(False)
        return model

    def module_names(self, names: tuple[str, ...]) -> dict[str, str]:
        from merging.checkpoints.names import module_names

        if self._outline is None:
            self._outline = self.skeleton()
        return dict(module_names(self._outline, names).renamed)

    def stacks(self, model: nn.Module) -> tuple[str, ...]:
        """Outermost ModuleLists of two or more children of one class (or one child) that hold linears."""
        from torch import nn

        from merging.tracer import is_linear

        found: list[str] = []
        for name, module in model.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in found)
            if inside or not isinstance(module, nn.ModuleList) or not len(module):
                continue
            alike = len({type(child) for child in module}) == 1
            parts = (part for child in module for part in child.modules() if part is not child)
            if alike and any(is_linear(part) for part in parts):
                found.append(name)
        if not found:
            raise TracingError(
                f"{type(model).__name__} has no list of like blocks",
                remedy="Merge it with a tensor-wise rule, or write a backbone that names its stacks.",
            )
        return tuple(found)

    def forward_kwargs(self, batch: Batch) -> dict[str, Any]:
        kwargs: dict[str, Any] = dict(batch)
        if "input_ids" in kwargs:
            kwargs["use_cache"] = False
        start = getattr(self.config, "decoder_start_token_id", None)
        if (
            "input_ids" in kwargs
            and "decoder_input_ids" not in kwargs
            and self._has_decoder
            and start is not None
        ):
            kwargs["decoder_input_ids"] = kwargs["input_ids"].new_full((len(kwargs["input_ids"]), 1), start)
        return kwargs

    @property
    def _has_decoder(self) -> bool:
        """Whether a decoder must be started, which batches without its inputs do with its first token."""
        return (
            bool(getattr(self.config, "is_encoder_decoder", False)) and "Encoder" not in self.architecture()
        )

    def example(self) -> Batch:
        import torch

        wanted = self.model_class().main_input_name
        if wanted == "pixel_values":
            config = self.model_config()
            size, channels = config.image_size, getattr(config, "num_channels", 3)
            height, width = size if isinstance(size, (list, tuple)) else (size, size)
            return {"pixel_values": torch.zeros(1, channels, height, width)}
        if wanted != "input_ids":
            return super().example()
        ids = torch.zeros(1, 8, dtype=torch.long)
        decoder = getattr(self.config, "is_encoder_decoder", False)
        return {"input_ids": ids, **({"decoder_input_ids": ids[:, :4]} if decoder else {})}

    def token_weights(
        self, batch: Batch, stack: str, module: str, tokens: tuple[int, ...], last: bool
    ) -> Tensor | None:
        mask_BT = batch.get(self._mask(stack, module))
        if mask_BT is None or mask_BT.ndim != 2 or bool((mask_BT != 0).all()):
            return None
        return _spread(mask_BT.float(), tuple(tokens), f'"{module}" in "{stack}"')

    def _mask(self, stack: str, module: str) -> str:
        """The mask of the tokens that a module sees: a decoder's, but for keys and values of its
        cross-attention."""
        if not getattr(self.config, "is_encoder_decoder", False) or "encoder" in stack.split("."):
            return "attention_mask"
        parts = module.split(".")
        crosses = any(part in _CROSS_ATTENTION for part in parts)
        return "attention_mask" if crosses and parts[-1] in _KEYS_AND_VALUES else "decoder_attention_mask"

    def features(self, output: Any, batch: Batch) -> Tensor:
        pooled = getattr(output, "pooler_output", None)
        if pooled is not None:
            return pooled
        hidden = getattr(output, "last_hidden_state", None)
        logits = getattr(output, "logits", None)
        if hidden is None and logits is not None and logits.ndim == 3:
            return _last(logits, batch.get(self._mask("decoder", "")))
        if hidden is None:
            raise DataError(
                f"{self.architecture()} gives neither pooled features nor hidden states for heads to read"
            )
        return hidden[:, 0]


def _last(x_BTV: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Each example's last token that is no padding: what a language model says next (B V)."""
    if mask_BT is None or tuple(mask_BT.shape) != tuple(x_BTV.shape[:2]):
        return x_BTV[:, -1]
    length = mask_BT.shape[1]
    last_B = length - 1 - mask_BT.flip(1).argmax(dim=1)
    rows = mask_BT.new_tensor(range(len(mask_BT)))
    return x_BTV[rows, last_B]


def _spread(mask_BT: Tensor, tokens: tuple[int, ...], where: str) -> Tensor:
    """The mask over all axes of `tokens`: (B T), flattened, or with an axis more for the heads that share a
    norm."""
    examples, length = mask_BT.shape
    if tokens == (examples, length):
        return mask_BT
    if tokens == (examples * length,):
        return mask_BT.reshape(-1)
    places = [axis for axis in range(1, len(tokens)) if tokens[axis] == length]
    if tokens[0] != examples or len(places) != 1:
        raise TracingError(
            f"{where} sees tokens of shape {tokens}, the attention mask is {(examples, length)}",
            remedy="Give batches without padding or of another length, or write a backbone for this model.",
        )
    shape = [examples, *(length if axis == places[0] else 1 for axis in range(1, len(tokens)))]
    return mask_BT.reshape(shape).expand(tokens)
