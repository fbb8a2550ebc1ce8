"""The base of all settings: frozen, and every unknown key is refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Subclass it, one `Field(default, bounds, description=...)` per setting; name the paper's symbol in the
    description."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
