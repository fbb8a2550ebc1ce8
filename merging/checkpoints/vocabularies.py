"""What the tokens of a checkpoint are, by text: read from its tokenizer's files, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merging.errors import CheckpointError

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
ADDED = "added_tokens.json"
CONFIG_KEYS = ("vocab_size", "vocab_size_per_layer_input")  # how many tokens a model has, by its config
_PIECES = ("tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model", "tekken.json")
_SHOWN = 3  # examples of each kind of difference


@dataclass(frozen=True)
class Vocabulary:
    """Text -> id of every token, added ones among them. `added`: what the tokenizer says of those.

    `ids` is empty where only `pieces` are there: a file that gives no ids without its tokenizer's code.
    """

    ids: Mapping[str, int]
    added: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    pieces: Path | None = None

    @property
    def stop(self) -> int:
        """One more than the largest id."""
        return max(self.ids.values(), default=-1) + 1


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Of a model's or an adapter's folder; None if no tokenizer lies there. Raises CheckpointError."""
    if not folder.is_dir():
        folder = folder.parent
    pieces = next((folder / name for name in _PIECES if (folder / name).is_file()), None)
    found = _main(folder)
    if found is None:
        return None if pieces is None else Vocabulary({}, {}, (pieces,), pieces)
    ids, added, files = found
    for name, entries in ((ADDED, _added_file(folder)), (SETTINGS, _added_settings(folder))):
        if entries:
            files.append(folder / name)
        for text, about in entries.items():
            added.setdefault(text, about)
            ids.setdefault(text, about["id"])
    return Vocabulary(ids, added, tuple(files), pieces)


@dataclass(frozen=True)
class Difference:
    """An expert's tokens against the base's, by text. `moved`: text, its id, the base's."""

    extra: tuple[str, ...]
    missing: tuple[str, ...]
    moved: tuple[tuple[str, int, int], ...]

    def __bool__(self) -> bool:
        return bool(self.extra or self.missing or self.moved)

    def __str__(self) -> str:
        said = []
        if self.extra:
            said.append(f"{len(self.extra)} of its tokens are not in the base ({_listed(self.extra)})")
        if self.missing:
            said.append(f"{len(self.missing)} of the base's it does not have ({_listed(self.missing)})")
        if self.moved:
            shown = [
                f"{json.dumps(text, ensure_ascii=False)}: row {here}, the base's {there}"
                for text, here, there in self.moved[:_SHOWN]
            ]
            more = ", ..." if len(self.moved) > _SHOWN else ""
            said.append(f"{len(self.moved)} have another row ({', '.join(shown)}{more})")
        return "; ".join(said) or "the same tokens"


def difference(base: Vocabulary, expert: Vocabulary) -> Difference:
    """Both must have ids. Sorted by id, so that examples are the first ones."""
    ours, theirs = base.ids, expert.ids
    extra = sorted((text for text in theirs if text not in ours), key=theirs.__getitem__)
    missing = sorted((text for text in ours if text not in theirs), key=ours.__getitem__)
    moved = [(text, at, ours[text]) for text, at in theirs.items() if ours.get(text, at) != at]
    return Difference(tuple(extra), tuple(missing), tuple(sorted(moved, key=lambda one: one[2])))


def same_pieces(base: Vocabulary, expert: Vocabulary) -> bool:
    """Whether both have the same file of pieces, byte for byte, and none adds tokens that the other lacks."""
    if base.pieces is None or expert.pieces is None or base.pieces.name != expert.pieces.name:
        return False
    alike = not base.ids or not expert.ids or base.added.keys() == expert.added.keys()
    return alike and base.pieces.read_bytes() == expert.pieces.read_bytes()


def _main(folder: Path) -> tuple[dict[str, int], dict[str, Mapping[str, Any]], list[Path]] | None:
    """Ids, added tokens and the file they come from."""
    file = folder / TOKENIZER
    if file.is_file():
        content = _json(file)
        try:
            table = content["model"]["vocab"]
            if isinstance(table, list):
                table = {text: index for index, (text, *_) in enumerate(table)}
            added: dict[str, Mapping[str, Any]] = {
                one["content"]: dict(one) for one in content.get("added_tokens") or ()
            }
            ids = {**table, **{text: one["id"] for text, one in added.items()}}
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file} is damaged: no table of tokens can be read from it") from error
        _refuse_other_than_ids(ids, file)
        return ids, added, [file]
    file = folder / "vocab.json"
    if file.is_file():
        table = _json(file)
        _refuse_other_than_ids(table, file)
        return dict(table), {}, [file]
    file = folder / "vocab.txt"
    if file.is_file():
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        return (
            {text.rstrip("\r"): at for at, text in enumerate(lines) if text or at < len(lines) - 1},
            {},
            [file],
        )
    return None


def _refuse_other_than_ids(table: Mapping[Any, Any], file: Path) -> None:
    for text, at in table.items():
        if not isinstance(text, str) or type(at) is not int or not 0 <= at < 1 << 31:
            found = f"{str(text)[:40]!r} to {str(at)[:40]!r}"
            raise CheckpointError(
                f"{file} is damaged: it maps the token {found}, expected an id",
                remedy="Download or copy it again.",
            )


def _added_file(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / ADDED
    found = _json(file) if file.is_file() else {}
    return {text: {"id": at, "content": text} for text, at in found.items() if type(at) is int and at >= 0}


def _added_settings(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / SETTINGS
    found = _json(file).get("added_tokens_decoder") if file.is_file() else None
    return {
        one["content"]: {**one, "id": int(at)}
        for at, one in (found.items() if isinstance(found, dict) else ())
        if isinstance(one, dict) and isinstance(one.get("content"), str) and str(at).isdecimal()
    }


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}, expected an object")
    return found


def _listed(texts: tuple[str, ...]) -> str:
    shown = ", ".join(json.dumps(text, ensure_ascii=False) for text in texts[:_SHOWN])
    return f"{shown}, ..." if len(texts) > _SHOWN else shown
