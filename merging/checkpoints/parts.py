"""Parts: stored tensors that hold several weights in their rows, seen weight by weight."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from merging.checkpoints.sink import CheckpointSink
from merging.checkpoints.source import CheckpointSource, TensorSpec
from merging.contracts.backbone import Location
from merging.low_rank import LowRank

if TYPE_CHECKING:
    from merging.contracts.method import Method
    from merging.contracts.models import Models


@dataclass(frozen=True)
class Parts:
    """Name of a part -> where it lies. The parts of one tensor cover all its rows, each once.

    Views of what is parted already are that itself, so that asking twice does no harm."""

    places: Mapping[str, Location]

    def whole(self, name: str) -> str:
        """The stored tensor of which `name` is a part; `name` itself where it is none."""
        return self.places[name].name if name in self.places else name

    def names(self, names: Iterable[str]) -> tuple[str, ...]:
        """The same names, parts in the place of what holds them."""
        inside = self._inside()
        return tuple(part for name in names for part in inside.get(name, (name,)))

    def wholes(self, names: Collection[str]) -> list[str]:
        """Stored tensors all of whose parts are among `names`, each once."""
        inside, given = self._inside(), set(names)
        found = dict.fromkeys(self.whole(name) for name in names)
        return [name for name in found if given.issuperset(inside.get(name, (name,)))]

    def source(self, source: CheckpointSource) -> CheckpointSource:
        """The checkpoint with parts in the place of what holds them."""
        held = {place.name for place in self.places.values()}
        return _PartedSource(source, self) if held.intersection(source.names()) else source

    def models(self, models: Models) -> Models:
        """Base and experts, seen so. What is kept is kept in all its parts."""
        if not self.places:
            return models
        return replace(
            models,
            base=self.source(models.base),
            experts={task: self.source(expert) for task, expert in models.experts.items()},
            kept=models.kept | set(self.names(models.kept)),
        )

    def read(self, weights: Mapping[str, Tensor], name: str) -> Tensor:
        """A weight, or a view of that part of one."""
        place = self.places.get(name)
        return weights[name] if place is None else weights[place.name][place.rows]

    def sink(self, sink: CheckpointSink) -> CheckpointSink:
        """Writes parts into the rows of what holds them; opened and closed is `sink` itself."""
        return _PartedSink(sink, self) if self.places else sink

    def _inside(self) -> dict[str, tuple[str, ...]]:
        inside: dict[str, tuple[str, ...]] = {}
        for part, place in self.places.items():
            inside[place.name] = (*inside.get(place.name, ()), part)
        return inside


def parts_seen(models: Models, method: type[Method]) -> Parts:
    """What a merge rule sees in the place of fused tensors: those that walk the model part it themselves."""
    from merging.contracts.merger import TensorMerger

    backbone = models.backbone
    if backbone is None or not backbone.merges_parts or not issubclass(method, TensorMerger):
        return Parts({})
    return Parts(backbone.parts(models.base.names()))


def as_seen(models: Models, method: type[Method]) -> Models:
    """The models as that merge rule sees them."""
    return parts_seen(models, method).models(models)


class _PartedSource(CheckpointSource):
    def __init__(self, source: CheckpointSource, parts: Parts) -> None:
        self.label, self._source, self._parts = source.label, source, parts
        self.files, self.notes = source.files, source.notes
        self._names = parts.names(source.names())

    def names(self) -> tuple[str, ...]:
        return self._names

    def spec(self, name: str) -> TensorSpec:
        spec, place = self._source.spec(self._parts.whole(name)), self._parts.places.get(name)
        if place is None:
            return spec
        return TensorSpec((len(range(*place.rows.indices(spec.shape[0]))), *spec.shape[1:]), spec.dtype)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        place = self._parts.places.get(name)
        return self._source.read(self._parts.whole(name), rows if place is None else _within(place, rows))

    def shard(self, name: str) -> str | None:
        return self._source.shard(self._parts.whole(name))

    def factors(self, name: str) -> LowRank | None:
        found, place = self._source.factors(self._parts.whole(name)), self._parts.places.get(name)
        if found is None or place is None:
            return found
        return LowRank(found.left_OR[place.rows], found.right_RI, found.scale)


class _PartedSink(CheckpointSink):
    def __init__(self, sink: CheckpointSink, parts: Parts) -> None:
        self._sink, self._parts = sink, parts

    def write(self, name: str, tensor: Tensor, rows: slice | None = None) -> None:
        place = self._parts.places.get(name)
        self._sink.write(self._parts.whole(name), tensor, rows if place is None else _within(place, rows))

    def close(self) -> None:
        self._sink.close()

    def abort(self) -> None:
        self._sink.abort()


def _within(place: Location, rows: slice | None) -> slice:
    """Rows of a part, counted in the tensor that holds it."""
    if rows is None:
        return place.rows
    start = place.rows.start
    first, last, step = rows.indices(place.rows.stop - start)
    return slice(start + first, start + last, step)
