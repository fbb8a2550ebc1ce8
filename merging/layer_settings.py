"""Settings that differ by part of the model: which tensors, by pattern, and what is different there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_serializer

from merging.errors import Problem, SpecError
from merging.settings import Settings

if TYPE_CHECKING:
    from merging.contracts.models import Models


class LayerEntry(BaseModel):
    """One entry of `layers`; in JSON one object: `{"match": "*attn*", "density": 0.5}`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    match: str = Field(
        min_length=1, description="Pattern on the names of stored tensors: * is any text, ? one character."
    )
    leave_out: bool | None = Field(
        None, description="True: these tensors stay the base's; false takes that back."
    )
    changes: dict[str, Any] = Field(
        default_factory=dict, description="Settings that differ, checked, as JSON values."
    )

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        left_out = {} if self.leave_out is None else {"leave_out": self.leave_out}
        return {"match": self.match, **left_out, **self.changes}

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.match)


@dataclass(frozen=True)
class LayerSettings:
    """All entries, in order. Of two that say the same thing of a tensor, the later one counts."""

    entries: tuple[LayerEntry, ...] = ()

    def leaves_out(self, name: str) -> bool:
        """Whether the tensor stays the base's."""
        said = [one.leave_out for one in self.entries if one.matches(name)]
        said = [answer for answer in said if answer is not None]
        return bool(said) and bool(said[-1])

    def settings_for(self, name: str, settings: Settings) -> Settings:
        """The settings for one tensor, checked by their class; the same object where nothing differs."""
        changes: dict[str, Any] = {}
        for entry in self.entries:
            if entry.changes and entry.matches(name):
                changes |= entry.changes
        return changed(settings, changes) if changes else settings

    def applied(self, models: Models) -> Models:
        """The same models, where what is left out counts as kept: no rule reads or changes it."""
        left_out = {name for name in models.base.names() if self.leaves_out(name)}
        return replace(models, kept=models.kept | left_out) if left_out else models

    def counts(self, models: Models) -> list[int]:
        """For each entry, how many of the tensors that are merged it matches."""
        names = merged_names(models)
        return [sum(entry.matches(name) for name in names) for entry in self.entries]

    def problems(self, models: Models, settings: Settings, where: str = "merge") -> list[Problem]:
        """Entries that do not fit the model: they match nothing, or what they set is left out or invalid."""
        names = merged_names(models)
        found = []
        for number, entry in enumerate(self.entries):
            place = f"{where}.layers[{number}]".lstrip(".")
            matched = [name for name in names if entry.matches(name)]
            if not matched:
                what = f'"{entry.match}" matches none of the {len(names)} tensors that are merged'
                found.append(Problem(f"{place}.match", what, _near(entry.match, names)))
            elif entry.changes and all(map(self.leaves_out, matched)):
                what = f'all {len(matched)} tensors that "{entry.match}" matches are left out'
                found.append(
                    Problem(place, what, 'Take that back with "leave_out": false, or drop the entry.')
                )
        return found or self._clashes(names, settings, where)

    def _clashes(self, names: Sequence[str], settings: Settings, where: str) -> list[Problem]:
        """Entries that are valid alone and not together, told once."""
        for name in names:
            try:
                self.settings_for(name, settings)
            except SpecError as error:
                return [Problem(f"{where}.layers".lstrip("."), f'for "{name}": {error.message}')]
        return []


def changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """These settings with some changed, checked again. Raises SpecError where they do not go together."""
    try:
        return type(settings).model_validate({**settings.model_dump(), **changes})
    except ValidationError as error:
        raise SpecError("; ".join(one["msg"] for one in error.errors(include_url=False))) from error


def merged_names(models: Models) -> tuple[str, ...]:
    """Tensors that a rule may change."""
    return tuple(
        name
        for name in models.base.names()
        if models.base.spec(name).dtype.is_floating_point and name not in models.kept
    )


def _near(pattern: str, names: Iterable[str]) -> str:
    names = tuple(names)
    wider = f"*{pattern.strip('*')}*"
    for guess in (wider, wider.lower()):
        if any(fnmatchcase(name, guess) for name in names):
            return f'did you mean "{guess}"? A pattern covers the whole name'
    shown = ", ".join([*names[:2], *names[2:][-2:]])
    return f"names are like {shown}; `merging inspect` lists all"
