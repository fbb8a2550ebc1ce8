"""class_problems: whether AutoModel makes of a config the class that its `architectures` names."""

from __future__ import annotations

from typing import Any

from torch import nn

from merging.contracts.backbone import Backbone
from merging.errors import Problem


def class_problems(backbone: Backbone) -> list[Problem]:
    """A config whose `model_type` is of another class than the one it names, with other tensors: the class
    would be merged and run here, and results would not load by the model type.

    Classes that hold the same tensors pass, and so do towers of a larger model. Other libraries' models and
    kinds that AutoModel does not know are not looked at."""
    from merging.backbones.pretrained import TransformersBackbone

    if not isinstance(backbone, TransformersBackbone):
        return []
    config, named = backbone.config, backbone.model_class()
    wanted, kind = getattr(named, "config_class", None), getattr(config, "model_type", "")
    if wanted is None or isinstance(config, wanted) or _are_parts(type(config), wanted):
        return []
    usual = _usual(kind)
    if usual is None or _layout(backbone.skeleton()) == _layout(_made(usual, config)):
        return []
    where = backbone.folder or "the base"
    what = (
        f'the config of {where} is of model_type "{kind}", which AutoModel loads as {usual.__name__}, and '
        f"names {named.__name__}, which has other tensors"
    )
    remedy = "Results would not load. Set model_type and architectures to what the weights were saved from."
    return [Problem("base", what, remedy)]


def _are_parts(found: Any, wanted: Any) -> bool:
    """Whether one config holds the other, as a CLIP's holds those of its towers."""
    inside = (getattr(found, "sub_configs", {}), getattr(wanted, "sub_configs", {}))
    return wanted in inside[0].values() or found in inside[1].values()


def _usual(kind: str) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto

    name = modeling_auto.MODEL_MAPPING_NAMES.get(kind)
    return getattr(transformers, name, None) if isinstance(name, str) else None


def _made(usual: Any, config: Any) -> nn.Module | None:
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    try:
        with no_init_weights(), init_empty_weights(include_buffers=False):
            model: nn.Module = usual(config)
    except (TypeError, ValueError, KeyError, AttributeError):  # it makes no model of this config at all
        return None
    return model


def _layout(model: nn.Module | None) -> set[tuple[str, tuple[int, ...]]] | None:
    """Names and shapes of the parameters without head and pooler."""
    if model is None:
        return None
    inner = getattr(model, "base_model", model)
    return {
        (name, tuple(parameter.shape))
        for name, parameter in inner.named_parameters()
        if "pooler" not in name.split(".")
    }
