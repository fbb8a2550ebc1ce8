"""Comparison: the tokens of each expert against the base's, and what is said where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from merging.checkpoints.lora_config import CONFIG
from merging.checkpoints.source import CheckpointSource
from merging.checkpoints.vocabularies import (
    TOKENIZER,
    Difference,
    Vocabulary,
    difference,
    read_vocabulary,
    same_pieces,
)
from merging.errors import Problem

Policy = Literal["base", "union", "backbone"]

POLICIES = (
    'Say in the spec what shall be done: "vocabulary": "base" (the base\'s tokens; rows are matched by their '
    'text), "union" (new tokens too, each row from its own expert) or "backbone" (embeddings and output head '
    "stay the base's)."
)
SAVE = 'AutoTokenizer.from_pretrained("...").save_pretrained("...") writes it.'


@dataclass(frozen=True)
class Member:
    """An expert under the base's names, and where its tokenizer lies."""

    source: CheckpointSource
    folder: Path
    weight: float = 1.0


_DONE = {
    "base": "rows are matched by text, its own tokens are dropped",
    "union": "rows are matched by text, its own tokens are added",
    "backbone": "embeddings and output head stay the base's",
}


def differing(base: Path, experts: Mapping[str, Path]) -> list[Problem]:
    """What is to be said of experts, by label, whose tokenizers are readable and not the base's."""
    ours = read_vocabulary(base)
    problems = []
    for label, folder in experts.items() if ours is not None and ours.ids else ():
        theirs = read_vocabulary(folder)
        if ours is None or theirs is None or not theirs.ids or same_pieces(ours, theirs):
            continue
        if found := difference(ours, theirs):
            problems.append(Problem(label, f"its vocabulary is not the base's: {found}"))
    return problems


class Comparison:
    """Problems, notes, and which experts are `different`; of those, `unknown` have tokens that nothing tells.

    `height`: rows of the base's embedding; `files`: of tokenizers that were read."""

    def __init__(
        self,
        policy: Policy | None,
        base: CheckpointSource,
        folder: Path,
        experts: Mapping[str, Member],
        axes: Mapping[str, int],
        walks: bool,
    ) -> None:
        self.policy, self.base, self.experts, self.axes, self.walks = policy, base, experts, axes, walks
        self.height = 0
        self.height = self.height_of(base)
        self.tokens = read_vocabulary(folder)
        self.theirs: dict[str, Vocabulary | None] = {}
        self.different: list[str] = []
        self.unknown: list[str] = []
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.files: dict[str, tuple[Path, ...]] = {}
        self._look_at_base()
        for task in experts:
            self._compare(task)
        stopping = [one for one in self.problems if one.where != "base"]
        if stopping and policy is None:
            last = self.problems.index(stopping[-1])
            self.problems[last] = stopping[-1]._replace(remedy=f"{stopping[-1].remedy} {POLICIES}".strip())

    def height_of(self, source: CheckpointSource) -> int:
        """Rows of the input embedding; the base's for a source that has none."""
        stored = set(source.names())
        name = next((name for name in self.axes if name in stored), None)
        return self.height if name is None else source.spec(name).shape[self.axes[name]]

    def _other_height(self, source: CheckpointSource) -> str:
        """The first table of tokens that has other rows than the base's; empty if there is none."""
        stored = set(source.names())
        ours = {name: self._rows(self.base, name) for name in self.axes if name in stored}
        return next((name for name, rows in ours.items() if self._rows(source, name) != rows), "")

    def _rows(self, source: CheckpointSource, name: str) -> int:
        return source.spec(name).shape[self.axes[name]] if name else 0

    def _look_at_base(self) -> None:
        tokens = self.tokens
        if tokens is None:
            return
        self.files["base"] = tokens.files
        if tokens.stop <= self.height:
            return
        what = f"its tokenizer's ids need {tokens.stop} rows, its embedding has {self.height}"
        if self.policy in (None, "union"):
            remedy = (
                "Give the base with the tokenizer that belongs to it. "
                '"vocabulary": "base" keeps both as they are.'
            )
            self.problems.append(Problem("base", what, remedy))
        else:
            self.notes.append(f"base: {what}; both stay as they are")

    def _compare(self, task: str) -> None:
        member, ours = self.experts[task], self.tokens
        theirs = self.theirs[task] = read_vocabulary(member.folder)
        if theirs is not None:
            self.files[task] = theirs.files
        other = self._other_height(member.source)
        sizes = f"{other} has {self._rows(member.source, other)} rows, "
        sizes += f"the base's {self._rows(self.base, other)}"
        found: Difference | None = None
        if ours is None or theirs is None:
            if not other:
                self._note_unseen(member, theirs)
                return
            lacking = "the base has" if ours is None else f"{member.source.label} has"
            lacking = "neither has a tokenizer" if ours is theirs else f"{lacking} no tokenizer"
            said = f"{sizes}, and {lacking} that names the tokens"
            self.unknown.append(task)
        elif same_pieces(ours, theirs):
            self.theirs[task] = ours
            if not other:
                return
            said = f"{sizes} (the tokenizers are the same)"
            if not ours.ids:
                self.unknown.append(task)
        elif not (ours.ids and theirs.ids):
            file = (ours if theirs.ids else theirs).pieces
            said = f"its tokens cannot be compared with the base's: {file} gives no ids"
            self.unknown.append(task)
        else:
            found = difference(ours, theirs)
            if not found and not other:
                return
            said = f"{found}; {sizes}" if other else str(found)
        self.different.append(task)
        self._judge(task, said, found)

    def _note_unseen(self, member: Member, theirs: Vocabulary | None) -> None:
        if theirs is None and self.tokens is not None and not (member.folder / CONFIG).is_file():
            self.notes.append(f"{member.source.label} has no tokenizer: its tokens are taken for the base's")
        elif theirs is not None and self.tokens is None:
            self.notes.append(
                f"the base has no tokenizer: the tokens of {member.source.label} are taken for its own"
            )

    def _judge(self, task: str, said: str, found: Difference | None) -> None:
        policy, label = self.policy, self.experts[task].source.label
        table = f"A {TOKENIZER} beside the weights of both says which row is which token: {SAVE}"
        if policy is None:
            remedy = table if task in self.unknown else ""
            self.problems.append(Problem(label, f"its vocabulary is not the base's: {said}", remedy))
        elif task in self.unknown and policy != "backbone":
            what = f'"vocabulary": "{policy}" matches tokens, but {said}'
            self.problems.append(Problem(label, what, f'{table} Or use "vocabulary": "backbone".'))
        elif task in self.unknown and self.walks:
            what = f"a method that runs this expert needs its rows under the base's tokens, but {said}"
            self.problems.append(Problem(label, what, f"{table} Or use methods that need no examples."))
        else:
            lacks = found is not None and bool(found.missing) and policy != "backbone"
            rest = ", rows of tokens that it lacks are the base's" if lacks else ""
            self.notes.append(f"{label}: {said}; {_DONE[policy]}{rest}")
