"""Which texts are local paths, where they lie, what was meant by one that is missing. No network."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Literal

from merging.registry import nearest
from merging.spec.findings import Findings
from merging.spec.wording import shortened

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
_DESCRIPTOR = re.compile(r"/dev/(stdin|fd/\d+)|/proc/[^/]+/fd/\d+")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".json")


class Paths:
    """Resolves against the spec's folder."""

    def __init__(self, folder: Path, findings: Findings) -> None:
        self.folder, self._findings = Path(os.path.abspath(folder)), findings

    def absolute(self, text: str | Path) -> Path:
        """The path, `~` and folder filled in; links are left as they are."""
        try:
            path = Path(text).expanduser()
        except RuntimeError:  # a `~name` that is nobody's home
            path = Path(text)
        return Path(os.path.abspath(self.folder / path))

    def model(self, text: str, where: str, *, revision: str | None = None) -> str:
        """An absolute path, or a hub id as it is. A local path must exist."""
        path = self.absolute(text)
        if exists(path):
            if revision is not None:
                what = f'found a revision, but "{shortened(text)}" is on this machine'
                self._findings.add(where, what, "A revision is for models of the hub; leave it out.")
            return str(path)
        if not self._is_local(text, pinned=revision is not None):
            return text
        hint = ""
        if _HUB_ID.fullmatch(text):
            hint = '; for the hub\'s model of that name give its "revision" too'
        self._findings.add(where, f'no such folder: "{shortened(text)}"', self._remedy(text) + hint)
        return str(path)

    def existing(self, given: Path, where: str, kind: Literal["file", "folder"]) -> Path:
        """The absolute path of a file or folder that must exist."""
        path = self.absolute(given)
        if not exists(path):
            self._findings.add(where, f'no such {kind}: "{shortened(str(given))}"', self._remedy(str(given)))
        elif path.is_dir() != (kind == "folder"):
            found = "file" if kind == "folder" else "folder"
            self._findings.add(where, f'"{shortened(str(given))}" is a {found}, expected a {kind}')
        return path

    def _is_local(self, text: str, *, pinned: bool) -> bool:
        """Whether what does not exist here was meant as a path. A pinned revision speaks for the hub."""
        if text.startswith(("./", "../", "/", "~")) or not _HUB_ID.fullmatch(text) or ".." in text:
            return True
        if pinned:
            return False
        if text.endswith(_WEIGHT_FILES):
            return True
        first, _, second = text.partition("/")
        if second:
            return (self.folder / first).is_dir()
        # A bare name is taken for a misspelt folder only where one of nearly that name lies beside the spec.
        return nearest(text, _folders(self.folder), cutoff=0.8) is not None

    def _remedy(self, text: str) -> str:
        """The nearest sibling of the first part that is missing, written the way the user wrote the path."""
        parts = Path(text).parts
        for length in range(1, len(parts) + 1):
            here = self.absolute(Path(*parts[:length]))
            if exists(here):
                continue
            if os.path.islink(here):  # of a name that is too long too
                leads = shortened(os.readlink(here))
                return f'"{shortened(str(here))}" is a link to "{leads}", which is not there'
            siblings = _entries(here.parent)
            guess = nearest(here.name, siblings)
            if guess:
                start = "./" if text.startswith("./") else ""
                return f'did you mean "{start}{Path(*parts[: length - 1], guess, *parts[length:])}"?'
            if not siblings:
                return f'nothing lies in "{shortened(str(here.parent))}"'
            more = ", ..." if len(siblings) > 6 else ""
            return f'in "{shortened(str(here.parent))}" there are: {", ".join(siblings[:6])}{more}'
        return ""


def is_stream(path: Path) -> bool:
    """Whether it is no file but what some program writes or wrote: a pipe, a terminal, standard input."""
    try:
        kind = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)) or _DESCRIPTOR.fullmatch(str(path)) is not None


def exists(path: Path) -> bool:
    """Whether it is there; a path that no file system could hold is not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(entry for entry in os.listdir(folder) if not entry.startswith("."))
    except OSError:
        return []


def _folders(folder: Path) -> list[str]:
    return [entry for entry in _entries(folder) if (folder / entry).is_dir()]
