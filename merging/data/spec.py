"""What the spec may say of a task's examples and of its head; which types exist is said here only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from merging.data.text_spec import DatasetData, TextData
from merging.data.zero_shot_spec import ZeroShotHeadSpec
from merging.evaluation.metric_spec import AccuracySpec, MetricSpec
from merging.settings import Settings


class TensorsData(Settings):
    """A safetensors file of stacked model inputs, used as given and in order."""

    type: Literal["tensors"] = "tensors"
    path: Path = Field(
        description="A safetensors file: first axis = example, names are the forward's keyword arguments "
        "(`pixel_values`, `input_ids`, ...), plus `labels` for tests."
    )
    examples: int | None = Field(default=None, ge=1, description="How many of them to use; all if not given.")
    batch_size: int | None = Field(
        default=None,
        ge=1,
        description='Examples per forward pass; if not given 32, or as many as "memory" allows.',
    )


class ImagesData(Settings):
    """A folder with one folder of images per class, prepared by the base's own image processor."""

    type: Literal["images"] = "images"
    path: Path = Field(description="A folder with one folder of images per class.")
    examples: int | None = Field(default=None, ge=1, description="How many to draw; all if not given.")
    batch_size: int | None = Field(
        default=None,
        ge=1,
        description='Examples per forward pass; if not given 32, or as many as "memory" allows.',
    )


class LinearHeadSpec(Settings):
    """A linear classifier on the model's features."""

    type: Literal["linear"] = "linear"
    path: Path = Field(
        description="A safetensors file with `weight` [classes, features] and, if any, `bias` [classes]."
    )


class ExpertHeadSpec(Settings):
    """The expert checkpoint's own classifier."""

    type: Literal["expert"] = "expert"


DataSpec: TypeAlias = Annotated[
    TensorsData | ImagesData | TextData | DatasetData, Field(discriminator="type")
]
HeadSpec: TypeAlias = Annotated[
    LinearHeadSpec | ExpertHeadSpec | ZeroShotHeadSpec, Field(discriminator="type")
]

DATA_TYPES: dict[str, type[Settings]] = {
    "tensors": TensorsData,
    "images": ImagesData,
    "text": TextData,
    "dataset": DatasetData,
}
HEAD_TYPES: dict[str, type[Settings]] = {
    "linear": LinearHeadSpec,
    "expert": ExpertHeadSpec,
    "zero_shot": ZeroShotHeadSpec,
}


class TaskSpec(Settings):
    """What is known about one task, named like its expert."""

    calibration: DataSpec | None = Field(
        default=None, description="Unlabelled examples for methods that need data."
    )
    validation: DataSpec | None = Field(
        default=None, description="Labelled examples to choose settings on; never those of the test."
    )
    test: DataSpec | None = Field(default=None, description="Labelled examples to measure on.")
    head: HeadSpec | None = Field(
        default=None, description="What turns features into scores; the expert's own classifier if not given."
    )
    metric: MetricSpec = Field(
        default=AccuracySpec(), description="What is measured on the test examples; its name, or an object."
    )
