"""One model of the suite, trained in a process of its own: an expert or the joint one, whole or as LoRA."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from merging.demo.fine_tuning import fast_arithmetic, fine_tune
from merging.demo.publishing import published
from merging.demo.side_by_side import Job, step_counter
from merging.demo.vision.augmentation import augmented
from merging.demo.vision.backbone import features, open_model, save_model, unit_scale
from merging.demo.vision.heads import head_of
from merging.demo.vision.tasks import Pictures

BATCH, LEAST_OF_A_TASK = 32, 8
PROTOTYPES = 1500
"""Training pictures that a task's head is made from."""


@dataclass(frozen=True)
class Recipe:
    """What one process is told. `pools` and `heads` are files by task; several tasks are mixed in each step.

    `rank` 0 trains all weights; otherwise an adapter of that rank and of twice that as alpha.
    """

    base: str
    pools: Mapping[str, str]
    heads: Mapping[str, str]
    folder: str
    steps: int
    seed: int
    learning_rate: float
    rank: int = 0

    def job(self, workshop: Path) -> Job:
        name = f"{Path(self.folder).parent.name} {Path(self.folder).name}"
        recipe = workshop / f"{name}.json"
        recipe.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return Job(name, __name__, (str(recipe),), self.steps)


def write_pool(pictures: Pictures, file: Path) -> None:
    """Training pictures as bytes with their labels."""
    tensors = {"pixels": torch.from_numpy(pictures.pixels), "labels": torch.from_numpy(pictures.labels)}
    save_file(tensors, file)


def read_pool(file: Path) -> Pictures:
    stored = load_file(file)
    return Pictures(stored["pixels"].numpy(), stored["labels"].numpy())


def write_head(base: Path, pool: Path, classes: int, file: Path) -> None:
    """The prototypes of a task's classes among the base's features of some training pictures."""
    save_file(head_of(base, read_pool(pool).spread(-(-PROTOTYPES // classes)), classes), file)


def train(recipe: Recipe, folder: Path, report: Callable[[int, int], None]) -> None:
    """Write the checkpoint or the adapter into `folder`."""
    torch.manual_seed(recipe.seed)  # what an adapter starts from
    model = open_model(Path(recipe.base)).train()
    tuned = model
    if recipe.rank:
        targets = [name for name, module in model.named_modules() if _is_target(name, module)]
        settings = LoraConfig(r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=targets)
        tuned = get_peft_model(model, settings)
    tasks = [
        _Task(read_pool(Path(recipe.pools[name])), load_file(recipe.heads[name])) for name in recipe.pools
    ]
    generator = torch.Generator().manual_seed(recipe.seed)

    def loss() -> Tensor:
        size = max(BATCH // len(tasks), LEAST_OF_A_TASK)
        batches = [task.batch(size, generator) for task in tasks]
        with fast_arithmetic():
            seen = features(model, torch.cat([images for images, _ in batches]))
        parts = seen.split([len(labels) for _, labels in batches])
        losses = [
            task.loss(part, labels) for task, part, (_, labels) in zip(tasks, parts, batches, strict=True)
        ]
        return torch.stack(losses).mean()

    weights = [weight for weight in tuned.parameters() if weight.requires_grad]
    fine_tune(weights, loss, learning_rate=recipe.learning_rate, steps=recipe.steps, report=report)
    if recipe.rank:
        tuned.save_pretrained(folder)
    else:
        save_model(model, folder)


@dataclass(frozen=True, eq=False)
class _Task:
    pictures: Pictures
    head: Mapping[str, Tensor]

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self.pictures), (size,), generator=generator).numpy()
        images = augmented(unit_scale(self.pictures.pixels[chosen]), generator)
        return images, torch.from_numpy(self.pictures.labels[chosen])

    def loss(self, features_BF: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(features_BF, self.head["weight"], self.head["bias"]), labels_B)


def _is_target(name: str, module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) and "layer." in name


def main(arguments: Sequence[str] | None = None) -> None:
    """One training, in the process made for it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    recipe = Recipe(**json.loads(parser.parse_args(arguments).recipe.read_text(encoding="utf-8")))
    torch.set_num_threads(1)
    with published(Path(recipe.folder)) as making:
        making.mkdir(exist_ok=True)
        train(recipe, making, step_counter())


if __name__ == "__main__":
    main()
