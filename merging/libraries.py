"""reading_with: what libraries raise over files that they read, told as an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from merging.errors import MergingError


@contextmanager
def reading_with(kind: type[MergingError], message: str, *, remedy: str = "") -> Iterator[None]:
    """Raise `kind`, with the library's own reason after `message`, for whatever it raises in the block.

    For files that others wrote, read by libraries that check a part of them: what is wrong with the rest
    comes up as any exception, from anywhere in them."""
    try:
        yield
    except MergingError:
        raise
    except Exception as error:
        told = str(error).strip().splitlines()
        reason = told[0].rstrip(":") if told else "no reason is given"
        if len(told) > 1 and told[0].endswith(":"):
            reason = f"{reason}: {told[1].strip()}"
        raise kind(f"{message}: {reason} ({type(error).__name__})", remedy=remedy) from error
