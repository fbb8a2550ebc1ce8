"""TransformersBackbone: what all models of transformers have in common, read from the checkpoint's config."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from merging.checkpoints.vocabularies import CONFIG_KEYS
from merging.contracts.backbone import Backbone, Batch, Location
from merging.errors import CheckpointError, DataError, TracingError
from merging.libraries import reading_with

if TYPE_CHECKING:
    from torch import Tensor, nn

_CROSS_ATTENTION = ("EncDecAttention", "encoder_attn", "crossattention", "cross_attn")
_KEYS_AND_VALUES = ("k", "v", "k_proj", "v_proj", "key", "value")


class TransformersBackbone(Backbone):
    """A model class of transformers, named by `architectures` in config.json; blocks are found by
    inspection."""

    outer_patterns: ClassVar[tuple[str, ...]] = ("pooler.*", "*.pooler.*")  # heads for tokens drop it
    head_patterns: ClassVar[tuple[str, ...]] = (
        "classifier.*",
        "score.*",
        "qa_outputs.*",
        "pre_classifier.*",
        "classification_head.*",
        "decode_head.*",
    )
    _outline: nn.Module | None = None  # a skeleton kept to ask for names
    _passed_over: Mapping[str, str] = MappingProxyType({})  # stack that cannot be walked -> why
    _is_bare = False  # whether the output head is left away

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
        found = getattr(transformers, name, None) or getattr(_modelling(self.config), name, None)
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
        """Without a text classifier: heads are kept per task and read what the backbone gives."""
        from merging.backbones.routed_experts import fused_experts, split_experts_

        model = self.whole()
        fused = fused_experts(model)
        if fused and not self._stores_experts_fused:
            split_experts_(model, fused)
        model.eval()
        model.requires_grad_(False)
        if not self._is_bare and not self.architecture().endswith("ForSequenceClassification"):
            return model
        inner: nn.Module = model.base_model  # type: ignore[assignment]
        return inner

    def whole(self) -> nn.Module:
        """The class that the config names as from_pretrained makes it, its head too, without weights."""
        from accelerate import init_empty_weights
        from transformers.initialization import no_init_weights

        made = self.model_class()
        where = self.folder or "the base"
        remedy = "Get config and weights from one place."
        with (
            reading_with(CheckpointError, f"the config of {where} makes no model", remedy=remedy),
            no_init_weights(),
            init_empty_weights(include_buffers=False),
        ):
            model: nn.Module = made(self.model_config(), **self._options(made))
        return model

    def _options(self, made: Any) -> dict[str, Any]:
        """Without the pooler where the class makes one by default and the checkpoint stores none."""
        takes = "add_pooling_layer" in inspect.signature(made.__init__).parameters
        return {"add_pooling_layer": False} if takes and self._lacks_pooler else {}

    @cached_property
    def _lacks_pooler(self) -> bool:
        """A pooler without weights (Swin's mean) is nothing that a checkpoint could lack."""
        if not self._stored or any(is_pooler(name) for name in self._stored):
            return False
        from accelerate import init_empty_weights
        from transformers.initialization import no_init_weights

        with no_init_weights(), init_empty_weights(include_buffers=False):
            model: nn.Module = self.model_class()(self.model_config())
        return any(is_pooler(name) for name, _ in model.named_parameters())

    def remarks(self) -> tuple[str, ...]:
        return (*self._remarks_on_pooler(), *self._remarks_on_stacks())

    def _remarks_on_stacks(self) -> tuple[str, ...]:
        """Of stacks that are passed over where others can be walked."""
        return tuple(
            f"the blocks of {stack} cannot be walked, and are only merged by methods that walk: {why}"
            for stack, why in self._passed_over.items()
        )

    def _remarks_on_pooler(self) -> tuple[str, ...]:
        if "add_pooling_layer" not in inspect.signature(self.model_class().__init__).parameters:
            return ()
        if not self._lacks_pooler:
            return ()
        return (
            f"the base stores no pooler, which {self.architecture()} has by default: it is run, merged and "
            "written without, and heads read the first token",
        )

    @cached_property
    def _stored(self) -> tuple[str, ...]:
        """Names of the tensors in the folder; none where there is no folder."""
        from merging.checkpoints.folder import open_checkpoint
        from merging.checkpoints.safetensors import SafetensorsSource
        from merging.checkpoints.weight_files import find_safetensors

        if self.folder is None:
            return ()
        # Straight from its files, as the folder may be one that is being made and checked.
        safe = find_safetensors(self.folder) is not None
        return (SafetensorsSource(self.folder) if safe else open_checkpoint(self.folder)).names()

    @cached_property
    def _stores_experts_fused(self) -> bool:
        """Whether the checkpoint, too, holds all experts in one tensor, which is no linear to solve."""
        return any(name.endswith("experts.gate_up_proj") for name in self._stored)

    def module_names(self, names: tuple[str, ...]) -> dict[str, str]:
        from merging.checkpoints.names import module_names

        return dict(module_names(self._outlined(), names).renamed)

    def parts(self, names: tuple[str, ...]) -> dict[str, Location]:
        from merging.backbones.split_weights import split_weights

        return split_weights(self._outlined(), names)

    def _outlined(self) -> nn.Module:
        if self._outline is None:
            self._outline = self.skeleton()
        return self._outline

    def resize_vocabulary(self, before: int, now: int) -> None:
        for config in (self.config, self.config.get_text_config()):
            for key in CONFIG_KEYS:
                if getattr(config, key, None) == before:
                    setattr(config, key, now)
        self._outline = None

    def read_by_heads(self) -> None:
        self._is_bare, self._outline = True, None

    def stacks(self, model: nn.Module) -> tuple[str, ...]:
        """Outermost ModuleLists of two or more children of one class (or one child) that hold linears, and
        whose blocks run once each, in order."""
        from torch import nn

        from merging.tracer import is_linear
        from merging.walkable import look

        found: list[str] = []
        for name, module in model.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in found)
            if inside or not isinstance(module, nn.ModuleList) or not len(module):
                continue
            alike = len({type(child) for child in module}) == 1
            if alike and isinstance(module[0], nn.ModuleList):  # lists of lists: the inner ones are run
                continue
            parts = (part for child in module for part in child.modules() if part is not child)
            if alike and any(is_linear(part) for part in parts):
                found.append(name)
        if not found:
            raise TracingError(
                f"{type(model).__name__} has no list of like blocks",
                remedy="Merge it with a tensor-wise rule, or write a backbone that names its stacks.",
            )
        seen = look(self, found)
        if seen is None:
            return tuple(found)
        walked = [stack for stack in found if stack not in seen.faults]
        if not walked:
            told = "; ".join(f"in {stack}, {why}" for stack, why in seen.faults.items())
            raise TracingError(
                f"{type(model).__name__} has no list of blocks that run once each, in order: {told}",
                remedy="Merge it with a rule that needs no data.",
            )
        self._passed_over = seen.faults
        later = iter([stack for stack in seen.reached if stack in walked])
        return tuple(next(later) if stack in seen.reached else stack for stack in walked)

    def forward_kwargs(self, batch: Batch) -> dict[str, Any]:
        import torch

        kwargs: dict[str, Any] = dict(batch)
        if "input_ids" in kwargs or self._takes("use_cache"):
            kwargs["use_cache"] = False
        if "input_ids" in kwargs:
            mask_BT = kwargs.get("attention_mask")
            if _padded_before(mask_BT) and "position_ids" not in kwargs and self._takes("position_ids"):
                # padding must not move the text
                kwargs["position_ids"] = positions(kwargs["attention_mask"]) + first_position(self.config)
        start = getattr(self.config, "decoder_start_token_id", None)
        if "decoder_input_ids" not in kwargs and self._has_decoder and start is not None:
            given = batch[self.model_class().main_input_name]
            kwargs["decoder_input_ids"] = given.new_full((len(given), 1), start, dtype=torch.long)
        return kwargs

    def _takes(self, name: str) -> bool:
        """Whether the model's forward names such an argument."""
        return name in inspect.signature(self.model_class().forward).parameters

    @property
    def _has_decoder(self) -> bool:
        """Whether a decoder must be started, which batches without its inputs do with its first token."""
        return bool(getattr(self.config, "is_encoder_decoder", False)) and self._takes("decoder_input_ids")

    def example(self) -> Batch:
        import torch

        wanted = self.model_class().main_input_name
        if wanted == "pixel_values":
            config = self.model_config()
            if not hasattr(config, "image_size"):
                return super().example()
            size, channels = config.image_size, getattr(config, "num_channels", 3)
            height, width = size if isinstance(size, (list, tuple)) else (size, size)
            return {"pixel_values": torch.zeros(1, channels, height, width)}
        ids = torch.zeros(1, 8, dtype=torch.long)
        decoder = {"decoder_input_ids": ids[:, :4]} if self._has_decoder else {}
        if wanted == "input_features" and hasattr(self.config, "max_source_positions"):
            # a spectrogram of the one length that the positions allow
            frames = 2 * self.config.max_source_positions
            return {wanted: torch.zeros(1, self.config.num_mel_bins, frames), **decoder}
        if wanted == "input_values":  # a second of sound
            return {wanted: torch.zeros(1, 16_000)}
        return {wanted: ids, **decoder} if wanted == "input_ids" else super().example()

    def token_weights(
        self, batch: Batch, stack: str, module: str, tokens: tuple[int, ...], last: bool
    ) -> Tensor | None:
        mask_BT = batch.get(self._mask(stack, module))
        if mask_BT is None or mask_BT.ndim != 2 or bool((mask_BT != 0).all()):
            return None
        return _spread(mask_BT.float(), tuple(tokens), lambda: self._token_axis(stack, module))

    def _token_axis(self, stack: str, module: str) -> int:
        from merging.backbones.token_axis import token_axis

        if (stack, module) not in self._axes:
            self._axes[stack, module] = token_axis(self, stack, module)
        return self._axes[stack, module]

    @cached_property
    def _axes(self) -> dict[tuple[str, str], int]:
        return {}

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
            return last_token(logits, batch.get(self._mask("decoder", "")))
        if hidden is None:
            raise DataError(
                f"{self.architecture()} gives neither pooled features nor hidden states for heads to read"
            )
        read = last_token if self._is_causal else first_token
        return read(hidden, batch.get("attention_mask"))

    @cached_property
    def _is_causal(self) -> bool:
        """Whether tokens see only those before them, so that the last one alone has read the whole text."""
        from transformers.models.auto import modeling_auto

        kind = getattr(self.config, "model_type", "")
        return (
            kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            and kind not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
            and not getattr(self.config, "is_encoder_decoder", False)
        )


def is_pooler(name: str) -> bool:
    """Whether a stored tensor is of the layer that some models put on their first token."""
    return "pooler" in name.split(".")[:-1]


def _modelling(config: Any) -> Any:
    """The module of transformers beside the config's own: it has classes that the package does not list."""
    name = type(config).__module__
    if not name.startswith("transformers.models."):
        return None
    return importlib.import_module(name.replace(".configuration_", ".modeling_"))


def _padded_before(mask_BT: Tensor | None) -> bool:
    return mask_BT is not None and mask_BT.ndim == 2 and bool((mask_BT[:, 0] == 0).any())


def positions(mask_BT: Tensor) -> Tensor:
    """Places of the tokens that are no padding, counted from each text's first; padding before it is at 0."""
    return (mask_BT.long().cumsum(dim=-1) - 1).clamp(min=0)


def first_position(config: Any) -> int:
    """The position of a text's first token: 0, or one after the padding's id in models that number positions
    from their ids, as RoBERTa does."""
    numbering = "create_position_ids_from_input_ids"
    modelling, pad = _modelling(config), getattr(config, "pad_token_id", None)
    if modelling is None or pad is None:
        return 0
    numbers = any(hasattr(one, numbering) for one in (modelling, *vars(modelling).values()))
    return int(pad) + 1 if numbers else 0


def last_token(x_BTV: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Each example's last token that is no padding: what a language model says next (B V)."""
    if mask_BT is None or tuple(mask_BT.shape) != tuple(x_BTV.shape[:2]):
        return x_BTV[:, -1]
    length = mask_BT.shape[1]
    last_B = length - 1 - (mask_BT != 0).int().flip(1).argmax(dim=1)
    return x_BTV[_rows(mask_BT), last_B]


def first_token(x_BTV: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Each example's first token that is no padding (B V)."""
    if not _padded_before(mask_BT) or mask_BT is None or tuple(mask_BT.shape) != tuple(x_BTV.shape[:2]):
        return x_BTV[:, 0]
    return x_BTV[_rows(mask_BT), (mask_BT != 0).int().argmax(dim=1)]


def _rows(mask_BT: Tensor) -> Tensor:
    import torch

    return torch.arange(len(mask_BT), device=mask_BT.device)


def _spread(mask_BT: Tensor, tokens: tuple[int, ...], token_axis: Callable[[], int]) -> Tensor:
    """The mask over all axes of `tokens`: (B T), flattened, or with an axis more for the heads that share a
    norm. `token_axis` is asked where there are as many heads as tokens."""
    examples, length = mask_BT.shape
    if tokens == (examples, length):
        return mask_BT
    if tokens == (examples * length,):
        return mask_BT.reshape(-1)
    places = [axis for axis in range(1, len(tokens)) if tokens[axis] == length]
    if tokens[0] != examples or not places:
        raise TracingError(
            f"a module sees tokens of shape {tokens}, the attention mask is {(examples, length)}",
            remedy="Give batches without padding, or write a backbone for this model.",
        )
    if len(places) > 1:
        places = [token_axis()]
    shape = [examples, *(length if axis == places[0] else 1 for axis in range(1, len(tokens)))]
    return mask_BT.reshape(shape).expand(tokens)
