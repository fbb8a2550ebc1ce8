"""`python -m merging`: the same as the command `merging`."""

from __future__ import annotations

from merging_cli.entry import run  # type: ignore[import-not-found]  # cli/, under its installed name

if __name__ == "__main__":
    run()
