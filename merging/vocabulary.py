"""match_vocabularies: base and experts brought to one vocabulary, token by token, or what stands against it.

Shape letters: V rows of the result's vocabulary, K rows that stay the base's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merging.checkpoints.misfits import listed
from merging.checkpoints.sink import CheckpointSink
from merging.checkpoints.source import CheckpointSource
from merging.checkpoints.vocabularies import TOKENIZER, difference
from merging.checkpoints.vocabulary_rows import MatchedSource, PinnedSink, Rows, mean_of, rows_of
from merging.errors import Problem
from merging.vocabulary_comparison import SAVE, Comparison, Member, Policy


@dataclass
class Matched:
    """`base` and `experts` with one row per token of the result; with `problems` they must not be used.

    `kept`: tensors that stay the base's. `height`: rows of the base's embedding; `rows`: of
    the result's, where there are more. `new`: text of
    a token that the result adds -> its id and what its expert's tokenizer says of it.
    """

    base: CheckpointSource
    experts: dict[str, CheckpointSource]
    kept: frozenset[str] = frozenset()
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: dict[str, tuple[Path, ...]] = field(default_factory=dict)
    height: int = 0
    rows: int | None = None
    new: dict[str, dict[str, Any]] = field(default_factory=dict)
    pinned_K: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    axes: Mapping[str, int] = field(default_factory=dict)

    def pinned(self, sink: CheckpointSink) -> CheckpointSink:
        """A sink in which new tokens' and padding rows are `base`'s, whatever a rule makes of them."""
        return PinnedSink(sink, self.base, self.pinned_K, self.axes) if len(self.pinned_K) else sink


def match_vocabularies(
    policy: Policy | None,
    base: CheckpointSource,
    folder: Path,
    experts: Mapping[str, Member],
    axes: Mapping[str, int],
    *,
    walks: bool = False,
) -> Matched:
    """Compare by the tokens' text. `axes`: tensors with a row per token. `walks`: some method runs experts.

    Raises CheckpointError for a tokenizer that is damaged."""
    sources = {task: member.source for task, member in experts.items()}
    if policy is not None and not axes:
        what = (
            f'"vocabulary": "{policy}" is for rows of tokens, and no tensor of the base is known to have any'
        )
        remedy = (
            'Leave "vocabulary" out: tensors are merged by name. open_clip has one table of tokens for all.'
        )
        return Matched(base, sources, problems=[Problem("base", what, remedy)])
    if not axes or not all(base.spec(name).shape for name in axes):
        return Matched(base, sources)
    found = Comparison(policy, base, folder, experts, axes, walks)
    matched = Matched(
        base,
        sources,
        problems=found.problems,
        notes=found.notes,
        files=found.files,
        height=found.height,
        axes=axes,
    )
    if found.different and not found.problems:
        _Matching(found, base, folder, matched).bring_together()
    return matched


class _Matching:
    def __init__(self, found: Comparison, base: CheckpointSource, folder: Path, matched: Matched) -> None:
        self.policy, self.experts, self.tokens, self.theirs = (
            found.policy,
            found.experts,
            found.tokens,
            found.theirs,
        )
        self.different, self.unknown, self._height = found.different, found.unknown, found.height_of
        self.base, self.folder, self.matched = base, folder, matched
        self.axes, self.height = matched.axes, matched.height

    def bring_together(self) -> None:
        """Fill in sources, kept tensors, new tokens and rows that stay."""
        matched, tokens = self.matched, self.tokens
        owners: dict[int, dict[str, int]] = {}
        if self.policy == "union":
            owners = self._new_tokens()
            if matched.problems:
                return
        if self.policy == "backbone":
            matched.kept = frozenset(self.axes)
        rows = max([self.height, *(at + 1 for at in owners)])
        if rows > self.height:
            matched.rows = rows
        ids = {} if tokens is None else {text: at for text, at in tokens.ids.items() if at < self.height}
        all_ids = ids | {text: one["id"] for text, one in matched.new.items()}
        if owners:
            matched.base = MatchedSource(self.base, self._base_rows(owners, rows))
        for task, member in self.experts.items():
            if task in self.different or owners:
                index_V = self._index(task, all_ids, rows)
                matched.experts[task] = self._matched(member.source, index_V)
        if tokens is not None and ids:
            known = set(ids.values())
            matched.pinned_K = torch.tensor([at for at in range(rows) if at not in known], dtype=torch.long)

    def _new_tokens(self) -> dict[int, dict[str, int]]:
        """Row of the result -> task -> row of its expert."""
        tokens = self.tokens
        assert tokens is not None
        owners: dict[int, dict[str, int]] = {}
        for task in sorted(self.different):
            theirs = self.theirs[task]
            assert theirs is not None
            extra = difference(tokens, theirs).extra
            for text in self._with_rows(task, {text: theirs.ids[text] for text in extra}):
                about = dict(theirs.added.get(text, {"content": text}))
                new = self.matched.new.setdefault(text, {**about, "id": tokens.stop + len(self.matched.new)})
                owners.setdefault(new["id"], {})[task] = theirs.ids[text]
        short = {name: self._stop(name, tokens.stop + len(owners)) for name in self.axes}
        if lost := {name: rows for name, rows in short.items() if rows <= max(owners, default=-1)}:
            name, rows = next(iter(lost.items()))
            what = f'"union" needs a row of each token, and {name} ends at {rows} of {self.height}: its rows '
            what += "are for the first tokens alone"
            self.matched.problems.append(Problem("base", what, 'Use "vocabulary": "base" or "backbone".'))
        if owners and not (self.folder / TOKENIZER).is_file():
            what = f'"union" adds {len(owners)} tokens to {TOKENIZER}, which {self.folder} does not have'
            self.matched.problems.append(Problem("base", what, SAVE))
        return owners

    def _with_rows(self, task: str, new: Mapping[str, int]) -> list[str]:
        """Those of the expert's own tokens that have a row; one in some of its tensors only is a problem."""
        source, matched = self.experts[task].source, self.matched
        stored = set(source.names())
        heights = {
            name: source.spec(name).shape[axis] if name in stored else 0 for name, axis in self.axes.items()
        }
        nowhere = [text for text, at in new.items() if at >= max(heights.values())]
        if nowhere:
            what = f"{len(nowhere)} of its tokens have no row and are left out: {listed(nowhere)}"
            matched.notes.append(f"{source.label}: {what}")
        for name, height in heights.items():
            lost = [text for text, at in new.items() if height <= at < max(heights.values())]
            if lost:
                what = f'"union" needs a row of each token, and {name} has none of {listed(lost)}'
                remedy = 'Save that layer with the expert, or use "vocabulary": "base".'
                matched.problems.append(Problem(source.label, what, remedy))
        return [text for text in new if text not in nowhere]

    def _base_rows(self, owners: Mapping[int, Mapping[str, int]], rows: int) -> dict[str, Rows]:
        index_V = torch.arange(rows)
        index_V[self.height :] = -1
        index_V[list(owners)] = -1
        weights = {member.source: member.weight for member in self.experts.values()}
        places = {
            at: {self.experts[task].source: place for task, place in one.items()}
            for at, one in owners.items()
        }
        return {
            name: Rows(index_V[: self._stop(name, rows)], mean_of(name, places, weights, axis), axis)
            for name, axis in self.axes.items()
        }

    def _index(self, task: str, ids: Mapping[str, int], rows: int) -> Tensor:
        """Where each row of the result lies in the expert's tensors, -1 for those that it lacks."""
        theirs, height = self.theirs[task], self._height(self.experts[task].source)
        index_V = torch.full((rows,), -1, dtype=torch.long)
        if task in self.unknown:
            return index_V
        if task not in self.different:  # the same tokens in the same rows
            index_V[: self.height] = torch.arange(self.height)
            index_V[[one["id"] for one in self.matched.new.values()]] = -1
            return index_V
        assert theirs is not None
        pairs = [(at, theirs.ids[text]) for text, at in ids.items() if theirs.ids.get(text, height) < height]
        if pairs:
            here, there = torch.tensor(pairs).T
            index_V[here] = there
        return index_V

    def _stop(self, name: str, rows: int) -> int:
        """Rows of that tensor in a result with so many of the input embedding: a shorter one stays so."""
        own = self.base.spec(name).shape[self.axes[name]]
        return rows if own >= self.height else own

    def _matched(self, source: CheckpointSource, index_V: Tensor) -> CheckpointSource:
        stored = set(source.names())
        rows = {}
        for name, axis in self.axes.items():
            if name in stored:
                own_V = index_V[: self._stop(name, len(index_V))]
                inside_V = own_V.where(own_V < source.spec(name).shape[axis], torch.tensor(-1))
                rows[name] = Rows(inside_V, rows_of(self.matched.base, name, axis), axis)
        return MatchedSource(source, rows)
