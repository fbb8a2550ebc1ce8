"""PreparedFolder: the base's side files as a result needs them, where they cannot be copied as they are."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from merging.checkpoints.side_files import side_files
from merging.checkpoints.vocabularies import ADDED, CONFIG_KEYS, SETTINGS, TOKENIZER
from merging.checkpoints.weight_files import refuse_outside
from merging.errors import CheckpointError

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class PreparedFolder:
    """A temporary copy of a folder's side files, changed; it goes when nothing holds this object."""

    def __init__(
        self,
        folder: Path,
        *,
        rows: tuple[int, int] | None = None,
        new: Mapping[str, Mapping[str, Any]] | None = None,
        without: tuple[str, ...] = (),
    ) -> None:
        """`rows`: of the vocabulary, before and now. `new`: text -> id and flags of a token to add.

        `without`: keys to leave out of config.json. Raises CheckpointError if the tokenizer does not take the
        tokens."""
        self.path = Path(tempfile.mkdtemp(prefix="merging-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        for name in side_files(folder).known:
            refuse_outside(folder, folder / name)
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, self.path / name)
        if rows is not None:
            self._change("config.json", lambda found: _resized(found, *rows))
        if without:
            self._change(
                "config.json", lambda found: {key: one for key, one in found.items() if key not in without}
            )
        if new:
            self._change(TOKENIZER, lambda found: {**found, "added_tokens": _added(found, new)})
            self._change(SETTINGS, lambda found: _decoder(found, new))
            self._change(ADDED, lambda found: {**found, **{text: one["id"] for text, one in new.items()}})
            self._check(new)

    def _change(self, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        file = self.path / name
        if file.is_file():
            found = change(json.loads(file.read_bytes()))
            file.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def _check(self, new: Mapping[str, Mapping[str, Any]]) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.path / TOKENIZER))
        for text, about in new.items():
            found = tokenizer.token_to_id(text)
            if found != about["id"]:
                raise CheckpointError(
                    f'the base\'s {TOKENIZER} takes the new token "{text}" as {found}, not as {about["id"]}',
                    remedy='Its ids have gaps. Use "vocabulary": "base" or "backbone".',
                )


def _resized(config: dict[str, Any], before: int, now: int) -> dict[str, Any]:
    """`vocab_size`, and that of layers' own tables, wherever the config has the old one; at its top if it is
    nowhere."""
    found = False

    def changed(part: Any) -> Any:
        nonlocal found
        if not isinstance(part, dict):
            return part
        grown = {key: now for key in CONFIG_KEYS if part.get(key) == before}
        found |= "vocab_size" in grown
        part = {**part, **grown}
        return {key: changed(one) for key, one in part.items()}

    result: dict[str, Any] = changed(config)
    return result if found else {**result, "vocab_size": now}


def _added(tokenizer: Mapping[str, Any], new: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    entries = [{"id": one["id"], "content": text, **_flags(one)} for text, one in new.items()]
    return [*(tokenizer.get("added_tokens") or ()), *entries]


def _decoder(settings: dict[str, Any], new: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    if "added_tokens_decoder" not in settings:
        return settings
    entries = {str(one["id"]): {"content": text, **_flags(one)} for text, one in new.items()}
    return {**settings, "added_tokens_decoder": {**settings["added_tokens_decoder"], **entries}}


def _flags(about: Mapping[str, Any]) -> dict[str, bool]:
    return {flag: bool(about.get(flag, False)) for flag in _FLAGS}
