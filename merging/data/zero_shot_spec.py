"""What the spec may say of a zero-shot head: classes by name, and sentences to put the names in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from merging.settings import Settings

SLOT = "{}"


class ZeroShotHeadSpec(Settings):
    """Class names and templates through the text tower of a CLIP."""

    type: Literal["zero_shot"] = "zero_shot"
    classes: tuple[str, ...] | Path | None = Field(
        default=None,
        description="Names of the classes in the order of the labels; or a file of them, one a line or a "
        "JSON list; as the task's examples name them if not given.",
    )
    templates: tuple[str, ...] = Field(
        default=("a photo of a {}.",), description="Sentences; {} is where the class's name goes."
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="Folder or hub id of the whole CLIP whose text tower is used; the base if not given.",
    )

    @model_validator(mode="after")
    def _usable(self) -> ZeroShotHeadSpec:
        from merging.spec.findings import refuse  # the spec package imports this one

        if isinstance(self.classes, tuple):
            if len(self.classes) < 2:
                refuse(f'"classes" has {len(self.classes)} names, expected at least 2')
            if not all(name.strip() for name in self.classes):
                refuse('"classes" has an empty name')
        if not self.templates:
            refuse('"templates" is empty', 'Leave it out for "a photo of a {}.".')
        for template in self.templates:
            if SLOT not in template:
                refuse(f'the template "{template}" has no {SLOT} for the name of the class')
        return self
