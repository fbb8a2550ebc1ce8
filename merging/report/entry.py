"""Entry: the base of all parts of a report, written to JSON and read from it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Entry(BaseModel):
    """Frozen; unknown keys are errors, since another version may mean something else by them.

    Infinite numbers (the condition of a singular matrix) are written as strings, as JSON has none.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="strings", use_attribute_docstrings=True
    )
