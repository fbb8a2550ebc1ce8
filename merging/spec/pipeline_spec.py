"""PipelineSpec: what a run is asked to do, every value checked, every path absolute."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from merging.data.spec import TaskSpec
from merging.errors import SpecError
from merging.registry import did_you_mean, nearest
from merging.settings import Settings, Weight
from merging.spec.component import AUTO, AutoSettings, BackboneChoice, Calibrators, Component, Strategy
from merging.spec.findings import refuse, told
from merging.spec.wording import described

FindingName: TypeAlias = Literal[
    "config",
    "other_base",
    "overlap",
    "disk",
    "memory",
    "processor",
    "far_from_base",
    "few_examples",
    "same_weights",
]
"""What `allow` may list: findings that stop a run, and from `far_from_base` on, those that only warn."""

DTYPES = ("base", "float32", "bfloat16", "float16", "float64")
_OTHER_NAMES = {
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "double": "float64",
    "fp64": "float64",
}
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "hpu", "npu")
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)},
}


def dtype_name(text: str) -> str:
    """`base` or a torch dtype's name; the names that torch and people use beside it are accepted."""
    name = text.removeprefix("torch.")
    name = _OTHER_NAMES.get(name, name)
    if name not in DTYPES:
        guess = nearest(name, [*DTYPES, *_OTHER_NAMES])
        remedy = (
            f'did you mean "{_OTHER_NAMES.get(guess, guess)}"?' if guess else f"valid: {', '.join(DTYPES)}"
        )
        refuse(f'"{text}" is not a dtype that checkpoints are written in', remedy)
    return name


def device_name(text: str) -> str:
    """`auto`, or a torch device such as `cuda:1`."""
    kind, colon, index = text.partition(":")
    if kind not in DEVICES or (colon and not (index.isascii() and index.isdecimal())):
        refuse(f'"{text}" is not a device', did_you_mean(kind, DEVICES))
    return text


def size_in_bytes(value: object) -> object:
    """`"5GB"` -> 5 000 000 000, `"2GiB"` -> 2 147 483 648; numbers are bytes already, None stays."""
    if value is None:
        return None
    expected = 'expected bytes, or a size such as "5GB", "500MB" or "2GiB"'
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            refuse(f"found {described(value)}, {expected}")
        value = float(match[1]) * _UNITS[match[2].upper()]
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(f"found {described(value)}, {expected}")
    if value < 1:
        refuse(f"{_bytes(value)}, expected at least one byte")
    if value >= 2**63:
        refuse(f"{_bytes(value)}, expected less than 2^63 (9.2 million TB)", 'Like "16GB" or "500MB".')
    return int(value)


def _bytes(value: int | float) -> str:
    """A number as it was given, be it whole and of thousands of digits."""
    return f"found {value:g} bytes" if abs(value) < 1e300 else "found a number of bytes beyond all measure"


class ModelRef(Settings):
    """A folder or a hub id, with the hub's revision."""

    model: str = Field(min_length=1, description="A folder, or an id on the hub (`owner/name`).")
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return {"model": value} if isinstance(value, str) else value

    @property
    def is_local(self) -> bool:
        """Whether it lies on this machine (its path is absolute) rather than on the hub."""
        return Path(self.model).is_absolute()


class ExpertRef(Settings):
    """A full checkpoint or an adapter on the base; exactly one of the two."""

    model: str | None = Field(
        default=None, min_length=1, description="A folder or hub id of a full checkpoint."
    )
    adapter: str | None = Field(
        default=None, min_length=1, description="A folder or hub id of a PEFT LoRA on the base."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub.")
    weight: Weight = Field(default=1.0, description="Weight of this expert, for methods that weigh experts.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return {"model": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _exactly_one(self) -> ExpertRef:
        if (self.model is None) == (self.adapter is None):
            found = "both" if self.model is not None else "neither"
            refuse(f'found {found}, expected exactly one of "model" and "adapter"')
        return self

    @property
    def ref(self) -> ModelRef:
        """Where its files are, be it a checkpoint or an adapter."""
        return ModelRef(model=self.model or self.adapter or "", revision=self.revision)


class OutputSpec(Settings):
    """Where the results go, and how the checkpoints are stored."""

    path: Path | None = Field(
        default=None, description="Folder of the results; `<spec name>-out` beside the spec."
    )
    dtype: Annotated[str, AfterValidator(dtype_name)] = Field(
        default="base", description="Storage dtype of the checkpoints: `base`, or a torch dtype."
    )
    shard_size: Annotated[int | None, BeforeValidator(size_in_bytes)] = Field(
        default=None,
        description='Largest weight file: bytes, or a size such as "5GB" or "2GiB"; if not given, tensors '
        "are spread over files as in the base.",
    )
    form: Literal["model", "lora"] = Field(
        default="model", description="Whole checkpoints, or PEFT adapters on the base."
    )
    rank: Annotated[int, Field(gt=0)] | Literal["exact"] | None = Field(
        default=None,
        description='Rank of an adapter\'s factors, 16 if not given; "exact": the rank which the change has, '
        "if that is low.",
    )

    @model_validator(mode="after")
    def _of_one_form(self) -> OutputSpec:
        if self.form == "model" and self.rank is not None:
            refuse('"rank" is for adapters', 'Add "form": "lora", or leave it out.')
        if self.form == "lora" and self.shard_size is not None:
            refuse("an adapter is one file", 'Leave "shard_size" out.')
        return self

    @property
    def adapter_rank(self) -> int | Literal["exact"]:
        """The rank, for the form `lora`."""
        return 16 if self.rank is None else self.rank


class PipelineSpec(Settings):
    """What a run is asked to do. `load_spec` and `parse_spec` make one and check all of it."""

    base: ModelRef = Field(description="The model that the experts were fine-tuned from.")
    experts: dict[str, ExpertRef] = Field(
        default_factory=dict, description="Task name -> a folder, a hub id, or an object."
    )
    backbone: BackboneChoice = Field(
        default=Component(type=AUTO, settings=AutoSettings()),
        description="The architecture: `auto` reads it from the checkpoint's config.",
    )
    merge: Strategy = Field(description="The merge rule: its name as `type`, and its settings.")
    calibrate: Calibrators = Field(default=(), description="One calibrator, or a list applied in order.")
    tasks: dict[str, TaskSpec] = Field(
        default_factory=dict, description="Expert's name -> its data, head and metric."
    )
    output: OutputSpec = Field(
        default=OutputSpec(), description="Where the results go, and how they are stored."
    )
    device: Annotated[str, AfterValidator(device_name)] = Field(
        default="auto", description="`auto`, or a torch device such as `cpu` or `cuda:0`."
    )
    memory: Annotated[int | None, BeforeValidator(size_in_bytes)] = Field(
        default=None,
        description='Most memory that the process may hold: bytes, or a size such as "8GiB". A run keeps to '
        "it by what it may choose, or is refused before any work; if not given, nothing limits it.",
    )
    precision: Literal["float32", "mixed", "float64"] = Field(
        default="float32",
        description="How models are run and their statistics summed. `mixed`: forwards and products in "
        "bfloat16, sums in float32, for layer-wise methods; faster, and less exact.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of everything random.")
    plugins: tuple[str, ...] = Field(
        default=(), description="Modules or .py files that define further methods."
    )
    allow: tuple[FindingName, ...] = Field(
        default=(), description="Names of pre-flight findings that shall not stop the run, nor be warned of."
    )
    vocabulary: Literal["base", "union", "backbone"] | None = Field(
        default=None,
        description="Tokens of experts whose tokenizers are not the base's, matched by text: keep the base's "
        "tokens, add the experts' own, or leave embeddings and head out. If not given, they stop the run.",
    )
    notes: str = Field(default="", description="Free text for people; nothing reads it.")

    def __init__(self, *others: object, **values: Any) -> None:
        """From its parts by name. Raises SpecError with all that do not fit."""
        if others:
            raise SpecError(
                "PipelineSpec() takes its parts by name", remedy="Pipeline.from_spec takes files and dicts."
            )
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = told(error, values, PipelineSpec)
            raise SpecError("this is no PipelineSpec", problems=problems) from error

    def canonical(self) -> dict[str, Any]:
        """What decides the results, as JSON values: all but where they go, device, memory and notes."""
        values = self.model_dump(mode="json", exclude={"device", "memory", "notes"})
        del values["output"]["path"]
        return values
