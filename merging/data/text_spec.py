"""What the spec may say of examples that are text: which columns are read, and what becomes of them."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from merging.settings import Settings

MAX_LENGTH = 512


class TextColumns(Settings):
    """Which columns are read, and what the model sees of them."""

    input: str = Field(default="text", min_length=1, description="Column of the input text.")
    prompt: str | None = Field(
        default=None,
        description="What the model reads, with columns in braces: `{premise}\\n{hypothesis}\\nAnswer:`; the "
        "input column alone if not given. `{{` and `}}` are braces.",
    )
    target: str | None = Field(
        default=None,
        min_length=1,
        description="Column of the text that the model should answer; an encoder-decoder's decoder reads it.",
    )
    label: str | None = Field(default=None, min_length=1, description="Column of the class.")
    labels: dict[str, str | tuple[str, ...]] | tuple[str, ...] | None = Field(
        default=None,
        description="Class -> its answer, or several that are as good, as they follow the prompt "
        '(`{"neg": " negative"}`); or a list of answers for classes 0, 1, ...',
    )
    max_length: int | None = Field(
        default=None,
        ge=1,
        description=f"Tokens of the prompt; longer ones lose text of their longest column, never of the "
        f"template. {MAX_LENGTH} if not given, or what the model can read if that is less.",
    )

    @property
    def template(self) -> str:
        return "{" + self.input + "}" if self.prompt is None else self.prompt

    @model_validator(mode="after")
    def _fits(self) -> TextColumns:
        from merging.spec.findings import refuse  # the spec package imports this one

        if self.labels is not None and self.label is None:
            refuse('"labels" names answers of classes, but no column of classes', 'Give "label" too.')
        if self.labels is not None and len(self.labels) < 2:
            refuse('"labels" has fewer than two classes')
        if self.prompt is None:
            return self
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(self.prompt) if field is not None]
            plain = all(
                not extra
                for _, _, spec, how in string.Formatter().parse(self.prompt)
                for extra in (spec, how)
            )
        except ValueError as error:
            refuse(
                f'"prompt" cannot be read: {error}', "Write a brace that is meant as such twice: {{ or }}."
            )
        if not fields or not all(fields) or not plain:
            refuse(
                '"prompt" has no column, or something else than a column, in its braces',
                'Like "{text}\\nAnswer:"; a brace that is meant as such is written twice.',
            )
        return self


class TextData(TextColumns):
    """Rows of text, through a prompt and the base's own tokenizer."""

    type: Literal["text"] = "text"
    path: Path = Field(description="JSON lines (.jsonl, .json), CSV (.csv, .tsv) or parquet.")
    examples: int | None = Field(default=None, ge=1, description="How many to draw; all if not given.")
    batch_size: int | None = Field(
        default=None,
        ge=1,
        description='Examples per forward pass; if not given 16, or as many as "memory" allows.',
    )


class DatasetData(TextColumns):
    """A data set of the `datasets` library: text through a prompt, or pictures."""

    type: Literal["dataset"] = "dataset"
    path: str = Field(
        min_length=1,
        description="A folder that `save_to_disk` wrote, a folder or file of parquet, CSV or JSON lines, or "
        "a name on the hub (`owner/name`).",
    )
    config: str | None = Field(
        default=None, min_length=1, description="Which of the data set's configurations."
    )
    split: str | None = Field(
        default=None, min_length=1, description="Which split; the only one if not given."
    )
    revision: str | None = Field(default=None, min_length=1, description="Branch, tag or commit on the hub.")
    image: str | None = Field(
        default=None,
        min_length=1,
        description="Column of pictures, for the base's image processor; then no text is read.",
    )
    examples: int | None = Field(default=None, ge=1, description="How many to draw; all if not given.")
    batch_size: int | None = Field(
        default=None,
        ge=1,
        description='Examples per forward pass; if not given 16, or as many as "memory" allows.',
    )
