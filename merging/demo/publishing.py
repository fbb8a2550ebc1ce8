"""Files and folders that appear under their name only when they are whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """Where to make a file or folder: leaving cleanly moves it to `target`, an error leaves nothing behind.

    Where someone else has published the same target meanwhile, theirs stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as workshop:
        making = Path(workshop) / target.name
        yield making
        try:
            making.rename(target)
        except OSError:
            if not target.exists():
                raise


def copy(source: Path, target: Path) -> None:
    """A copy of its own, not a link: whoever edits the one in place leaves the other as it is."""
    with published(target) as making:
        if source.is_dir():
            shutil.copytree(source, making)
        else:
            shutil.copy2(source, making)
