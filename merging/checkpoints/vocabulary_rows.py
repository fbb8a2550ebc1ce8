"""Rows of embeddings and heads brought into the order of another vocabulary, read when asked for.

Shape letters: V rows of the result's vocabulary, K rows asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from merging.checkpoints.names import NameMap, tie_group
from merging.checkpoints.rounding import rounded
from merging.checkpoints.sink import CheckpointSink
from merging.checkpoints.source import CheckpointSource, TensorSpec

if TYPE_CHECKING:
    from merging.low_rank import LowRank

_GAP = 64  # rows that are read along with those wanted, rather than opening the file again
_LEAVES = ("embed_tokens", "shared", "wte", "word_embeddings", "token_embedding", "lm_head", "embed_out")
_INPUT, _PER_LAYER = "get_input_embeddings", "get_per_layer_input_embeddings"  # what model classes are asked


@dataclass(frozen=True)
class Rows:
    """Where each row of the result lies in a source: `index_V`, -1 where `elsewhere` gives it.

    `axis`: that of the vocabulary, 0 but for biases that are stored as one row.
    """

    index_V: Tensor
    elsewhere: Callable[[Tensor], Tensor]  # rows of the result (K) -> their values (K ...)
    axis: int = 0


class MatchedSource(CheckpointSource):
    """Another source; tensors named in `rows` have their rows where the result's vocabulary has them."""

    def __init__(self, source: CheckpointSource, rows: Mapping[str, Rows]) -> None:
        self.label, self.files, self.notes = source.label, source.files, source.notes
        self._source, self._rows = source, dict(rows)

    def names(self) -> tuple[str, ...]:
        return self._source.names()

    def spec(self, name: str) -> TensorSpec:
        spec = self._source.spec(name)
        if name not in self._rows:
            return spec
        shape, axis = list(spec.shape), self._rows[name].axis
        shape[axis] = len(self._rows[name].index_V)
        return TensorSpec(tuple(shape), spec.dtype)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        found = self._rows.get(name)
        if found is None:
            return self._source.read(name, rows)
        if found.axis:
            return self._turned(name, found) if rows is None else self._turned(name, found)[rows]
        wanted_K = torch.arange(len(found.index_V))
        wanted_K = wanted_K if rows is None else wanted_K[rows]
        index_K = found.index_V[wanted_K]
        own_K = index_K >= 0
        if bool(own_K.all()):
            return gathered(self._source, name, index_K)
        own = gathered(self._source, name, index_K[own_K])
        result = own.new_empty(len(index_K), *own.shape[1:])
        result[own_K] = own
        result[~own_K] = rounded(found.elsewhere(wanted_K[~own_K]), result.dtype, name=name)
        return result

    def shard(self, name: str) -> str | None:
        return self._source.shard(name)

    def factors(self, name: str) -> LowRank | None:
        return None if name in self._rows else self._source.factors(name)

    def _turned(self, name: str, found: Rows) -> Tensor:
        whole = self._source.read(name)
        result = whole.index_select(found.axis, found.index_V.clamp_min(0))
        lost_K = (found.index_V < 0).nonzero().flatten()
        if len(lost_K):
            result.index_copy_(found.axis, lost_K, found.elsewhere(lost_K).to(result.dtype))
        return result


def gathered(source: CheckpointSource, name: str, index_K: Tensor) -> Tensor:
    """Those rows of a stored tensor, in that order; neighbours are read together."""
    if not len(index_K):
        return source.read(name, slice(0, 0))
    sorted_K, order_K = index_K.sort(stable=True)
    cuts = ((sorted_K.diff() > _GAP).nonzero().flatten() + 1).tolist()
    parts = []
    for first, last in zip([0, *cuts], [*cuts, len(sorted_K)], strict=True):
        start, stop = int(sorted_K[first]), int(sorted_K[last - 1]) + 1
        parts.append(source.read(name, slice(start, stop))[sorted_K[first:last] - start])
    found = torch.cat(parts)
    result = torch.empty_like(found)
    result[order_K] = found
    return result


def mean_of(
    name: str,
    owners: Mapping[int, Mapping[CheckpointSource, int]],
    weights: Mapping[CheckpointSource, float],
    axis: int,
) -> Callable[[Tensor], Tensor]:
    """Rows of the result -> the weighted mean of their owners' rows, in float64.

    `owners`: row of the result -> source -> row there. Weights that add up to 0 count alike.
    """

    def read(rows_K: Tensor) -> Tensor:
        held: dict[CheckpointSource, list[tuple[int, int, float]]] = {}
        for place, at in enumerate(rows_K.tolist()):
            total = sum(weights[one] for one in owners[at])
            for one, there in owners[at].items():
                share = weights[one] / total if total else 1 / len(owners[at])
                held.setdefault(one, []).append((place, there, share))
        mixed: Tensor | None = None
        for source, entries in held.items():
            places, there_K, shares = (torch.tensor(column) for column in zip(*entries, strict=True))
            rows = rows_of(source, name, axis)(there_K).double()
            shape = list(rows.shape)
            shape[axis] = len(rows_K)
            mixed = torch.zeros(shape, dtype=torch.float64) if mixed is None else mixed
            factor = shares.double().view(-1, *[1] * (rows.ndim - 1 - axis))
            mixed.index_add_(axis, places, rows * factor)
        assert mixed is not None
        return mixed

    return read


def rows_of(source: CheckpointSource, name: str, axis: int) -> Callable[[Tensor], Tensor]:
    """Rows by their number in that source."""

    def read(rows_K: Tensor) -> Tensor:
        return source.read(name).index_select(axis, rows_K) if axis else gathered(source, name, rows_K)

    return read


class PinnedSink(CheckpointSink):
    """Hands on what is written; rows which no rule may touch are those of `base`, bit for bit."""

    def __init__(
        self, sink: CheckpointSink, base: CheckpointSource, rows_K: Tensor, axes: Mapping[str, int]
    ) -> None:
        """`rows_K`, sorted, of the tensors in `axes`."""
        self._sink, self._base, self._rows_K, self._axes = sink, base, rows_K, axes

    def write(self, name: str, tensor: Tensor, rows: slice | None = None) -> None:
        axis = self._axes.get(name)
        if axis is None or not len(self._rows_K):
            self._sink.write(name, tensor, rows)
            return
        stop = self._base.spec(name).shape[axis]
        first, last, _ = (slice(None) if rows is None or axis else rows).indices(stop)
        inside_K = self._rows_K[(self._rows_K >= first) & (self._rows_K < last)]
        if len(inside_K):
            pinned = rows_of(self._base, name, axis)(inside_K)
            tensor = tensor.detach().to(torch.promote_types(tensor.dtype, pinned.dtype), copy=True)
            tensor.index_copy_(axis, (inside_K - first).to(tensor.device), pinned.to(tensor))
        self._sink.write(name, tensor, rows)

    def close(self) -> None:
        self._sink.close()

    def abort(self) -> None:
        self._sink.abort()


def vocabulary_axes(model: nn.Module | None, names: NameMap, source: CheckpointSource) -> dict[str, int]:
    """Stored tensors with one row per token -> the axis of these rows; the input embedding comes first.

    By the embeddings that the model class names; without one, and where the text is of a part that is not
    walked (a whole CLIP of which the image tower is), by the names that such layers have.
    """
    if model is None:
        return _by_name(source.names(), source)
    places = _places(model)
    found: dict[str, int] = {}
    for place, axis in places.items():
        found |= {name: axis for name, inside in names.renamed.items() if inside == place}
    return found or _by_name(names.unused, source)


def _by_name(names: Sequence[str], source: CheckpointSource) -> dict[str, int]:
    return {
        name: 0
        for name in names
        if name.split(".")[-2:-1] and name.split(".")[-2] in _LEAVES and len(source.spec(name).shape) == 2
    }


def _places(model: nn.Module) -> dict[str, int]:
    """Names in the module -> axis of the vocabulary. The model class says which tables are of tokens: others
    may be as tall (positions, a vocabulary of pictures)."""
    tables = _embeddings(model)
    if not tables:
        return {}
    state, height = model.state_dict(), tables[0].num_embeddings
    found: dict[str, int] = {}
    for table in tables:
        found |= {f"{name}.weight": 0 for name, module in model.named_modules() if module is table}
    found |= dict.fromkeys(_head(model, state, height), 0)
    bias = state.get("final_logits_bias")
    if bias is not None and bias.shape[1:] == (height,):
        found["final_logits_bias"] = 1
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {alias for one in found for alias in tie_group(one, ties)}
    return found | {alias: 0 for alias in sorted(shared) if alias in state and alias not in found}


def _embeddings(model: nn.Module) -> list[nn.Embedding]:
    """The model's input embedding, or the one height of those that its parts have; then those of its parts
    that are as tall, and of its layers."""
    parts = [part for part in model.modules() if hasattr(part, _INPUT)]
    named = [one for part in parts if isinstance(one := _asked(part, _INPUT), nn.Embedding)]
    first = _asked(model, _INPUT)
    if not isinstance(first, nn.Embedding):
        if len({one.num_embeddings for one in named}) != 1:
            return []
        first = named[0]
    alike = [one for one in named if one.num_embeddings == first.num_embeddings]
    layers = [one for part in parts if isinstance(one := _asked(part, _PER_LAYER), nn.Embedding)]
    return list({id(one): one for one in (first, *alike, *layers)}.values())


def _head(model: nn.Module, state: Mapping[str, Tensor], height: int) -> list[str]:
    """Tensors of the output head with a row per token. It may have fewer rows than a decoder's embedding,
    whose last ones are then of what is never said; another number is another vocabulary."""
    output = _asked(model, "get_output_embeddings")
    config = getattr(model, "config", None)
    said = None
    if config is not None and not getattr(config, "is_encoder_decoder", False):
        said = getattr(config.get_text_config(), "vocab_size", None)
    found: list[str] = []
    for name, module in model.named_modules() if output is not None else ():
        weight = state.get(f"{name}.weight")
        if module is not output or weight is None or not weight.ndim:
            continue
        rows = weight.shape[0]
        if rows == height or (rows < height and rows == said):
            parent = name.rpartition(".")[0]
            candidates = [f"{name}.weight", f"{name}.bias", *([f"{parent}.bias"] if parent else [])]
            found += [one for one in candidates if one in state and state[one].shape[:1] == (rows,)]
    return found


def _asked(model: nn.Module, question: str) -> nn.Module | None:
    try:
        return getattr(model, question)()
    except (AttributeError, NotImplementedError):  # models without text
        return None
