"""An expert's own head, of any kind, kept bit for bit in a folder from which it can be loaded again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from merging.data.heads import CLASSIFIERS

HEAD_FILE = "head.safetensors"
CONFIG_FILE = "config.json"


def save_kept_head(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None, folder: Path
) -> tuple[Path, ...]:
    """Write the tensors under the names of the expert's file, and the config of a model that has this head.

    `config`: the expert's own; where an adapter brought the head, the base's. The files written.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / HEAD_FILE, {"format": "pt"}
    )
    if config is None:
        return (folder / HEAD_FILE,)
    text = json.dumps(_with_classes(config, tensors), indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    return folder / HEAD_FILE, folder / CONFIG_FILE


def _with_classes(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config, its classes those of the head where that is one linear layer and has another number."""
    weights = [
        tensor
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.ndim == 2 and name.split(".")[-2] in (*CLASSIFIERS, "out_proj")
    ]
    known = len(config.get("id2label") or ()) or config.get("num_labels") or 2
    if len(weights) != 1 or weights[0].shape[0] == known:
        return dict(config)
    names = [f"LABEL_{number}" for number in range(weights[0].shape[0])]
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: at for at, name in enumerate(names)}}
    return {**{key: value for key, value in config.items() if key != "num_labels"}, **labels}
