"""One algorithm of fusion_bench on our inputs; run by the Python of the environment that has it.

    fusion_bench_run.py METHOD --inputs DIR --out DIR --tasks N [--examples N] [--batch 32] [--steps 1]

Its classes are called directly, without hub and hydra. The zero-shot heads, which the RegMeans build from
a CLIP of the hub and whose logits they throw away, are left out; the data sets are our files of pictures.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from fusion_bench.modelpool import CLIPVisionModelPool
from safetensors import safe_open

METHODS = ("ties", "wudi", "tsv_m", "iso_c", "regmean", "regmean_plus_plus")


class Pictures(torch.utils.data.Dataset):
    """The first examples of one task."""

    def __init__(self, file: Path, examples: int) -> None:
        with safe_open(file, "pt") as opened:
            self.pixels = opened.get_slice("pixel_values")[:examples]

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, number: int) -> Any:
        return self.pixels[number], 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--examples", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1)
    asked = parser.parse_args()
    result = algorithm(asked).run(pool(asked))
    result.save_pretrained(asked.out, safe_serialization=True)


def pool(asked: argparse.Namespace) -> CLIPVisionModelPool:
    class Pool(CLIPVisionModelPool):
        def load_processor(self, *_: Any, **__: Any) -> Any:
            return lambda image: image

        def load_train_dataset(self, name: str, *_: Any, **__: Any) -> Pictures:
            return Pictures(asked.inputs / f"px{name.removeprefix('task')}.safetensors", asked.examples)

    tasks = [f"task{number}" for number in range(asked.tasks)]
    models = {task: str(asked.inputs / task) for task in tasks}
    return Pool(models={"_pretrained_": str(asked.inputs / "base"), **models})


def algorithm(asked: argparse.Namespace) -> Any:
    if asked.method == "ties":
        from fusion_bench.method.ties_merging import TiesMergingAlgorithm

        return TiesMergingAlgorithm(scaling_factor=0.3, threshold=20, remove_keys=[], merge_func="sum")
    if asked.method == "wudi":
        from fusion_bench.method.wudi import WUDIMerging

        return WUDIMerging(iter_num=asked.steps)
    if asked.method == "tsv_m":
        from fusion_bench.method.task_singular_vector import TaskSingularVectorMerging

        return TaskSingularVectorMerging()
    if asked.method == "iso_c":
        from fusion_bench.method.isotropic_merging import ISO_C_Merge

        return ISO_C_Merge(scaling_factor=1.0)
    return _regmean(asked)


def _regmean(asked: argparse.Namespace) -> Any:
    if asked.method == "regmean":
        from fusion_bench.method.regmean.clip_regmean import RegMeanAlgorithmForCLIP as Published
    else:
        from fusion_bench.method.regmean_plusplus.clip_regmean_plusplus import (
            RegMeanAlgorithmForCLIPPlusPlus as Published,
        )
    mapping = getattr(Published, "_config_mapping", None)
    if isinstance(mapping, dict) and not hasattr(mapping, "inverse"):
        from bidict import bidict  # 0.2.33 cannot construct its RegMean++: a dict stands where it wants this

        Published._config_mapping = bidict({**Published.__mro__[1]._config_mapping, **mapping})

    class Headless(Published):
        def on_regmean_start(self) -> None:
            return None

        def compute_logits(self, module: Any, batch: Any, task: str) -> Any:
            return module(batch[0])

    return Headless(
        num_regmean_examples=asked.examples,
        exclude_param_names_regex=[],
        reduce_non_diagonal_ratio=0.95,
        weight_transpose=True,
        dataloader_kwargs={"batch_size": asked.batch, "num_workers": 0},
    )


if __name__ == "__main__":
    main()
