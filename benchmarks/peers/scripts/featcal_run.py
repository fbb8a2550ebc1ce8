"""FeatCal by its authors' code on our inputs; run by the Python of the environment that has it.

    featcal_run.py --src CHECKOUT/src --inputs DIR --out DIR --tasks N --examples N [--batch 16]

Base and experts are loaded, task arithmetic (0.3) is built, calibrated, saved. The peer's data layer,
which downloads from the hub, is replaced by the files of pictures; with transformers 5, for which it was
not written, so are three small functions that reach into the module tree.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--src", required=True)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--examples", type=int, required=True)
    parser.add_argument("--batch", type=int, default=16)
    asked = parser.parse_args()
    sys.path.insert(0, asked.src)
    peer = _peer(asked.inputs)
    from featcal.models import load_vision_model

    tasks = [f"task{number}" for number in range(asked.tasks)]
    base = load_vision_model(str(asked.inputs / "base"))
    experts = {task: load_vision_model(str(asked.inputs / task)) for task in tasks}
    merged = load_vision_model(str(asked.inputs / "base"))
    with torch.no_grad():
        target, start = merged.state_dict(), base.state_dict()
        for expert in experts.values():
            for name, value in expert.state_dict().items():
                if value.is_floating_point():
                    target[name].add_(value - start[name], alpha=0.3)
    config = peer.FeatCalConfig(num_calibration_examples=asked.examples, calibration_batch_size=asked.batch)
    calibrator = peer.CLIPFeatCalibrator(config, processor=None, device=torch.device("cpu"))
    result = calibrator.calibrate(merged_model=merged, base_model=base, expert_models=experts, tasks=tasks)
    result.save_pretrained(asked.out, safe_serialization=True)


def _peer(inputs: Path) -> Any:
    import featcal.featcal as peer

    def pictures(dataset: str, _processor: object, *, batch_size: int, **_: object) -> Iterator[Any]:
        with safe_open(inputs / f"px{dataset.removeprefix('task')}.safetensors", "pt") as file:
            stored = file.get_slice("pixel_values")
            for start in range(0, stored.get_shape()[0], batch_size):
                yield stored[start : start + batch_size], None

    peer.load_task_dataset = lambda task, split, *, cache_dir=None: task
    peer.make_clip_loader = pictures
    if int(transformers.__version__.split(".")[0]) >= 5:
        peer._clip_layers = lambda model: model.encoder.layers
        peer._clip_first_layer_input = lambda model, pixels: model.pre_layrnorm(model.embeddings(pixels))
        peer._forward_clip_layer = lambda layer, hidden: layer(hidden, attention_mask=None)
    return peer


if __name__ == "__main__":
    main()
