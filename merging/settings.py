"""The base of all settings: frozen, and every unknown key is refused. Kinds of numbers that many have."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

LARGEST_WEIGHT = 1e12  # of an expert: it may be the number of its examples

Weight: TypeAlias = Annotated[float, Field(ge=-LARGEST_WEIGHT, le=LARGEST_WEIGHT, allow_inf_nan=False)]
"""Of an expert."""
Scale: TypeAlias = Annotated[float, Field(ge=-1000, le=1000)]
"""A factor of task vectors: published ones are between 0 and 3, and negative ones negate."""
Rate: TypeAlias = Annotated[float, Field(gt=0, le=10)]
"""Of an optimiser of Adam's kind: about what an entry can move in one step."""
Steps: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000)]
"""How often something is done: published numbers are in the hundreds."""
Width: TypeAlias = Annotated[int, Field(ge=1, le=65_536)]
"""Of a small network, and of batches."""


class Settings(BaseModel):
    """Subclass it, one `Field(default, bounds, description=...)` per setting; name the paper's symbol in the
    description."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
