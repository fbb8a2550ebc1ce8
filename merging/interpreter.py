"""interpreter: an option of Python's under which libraries cannot be used, told before they are loaded."""

from __future__ import annotations

import sys

from merging.errors import SpecError


def refuse_without_docstrings() -> None:
    """Raise SpecError under `python -OO`: transformers reads its own docstrings as it is loaded."""
    if sys.flags.optimize >= 2:
        raise SpecError(
            "Python runs without docstrings (-OO, or PYTHONOPTIMIZE=2), which transformers cannot do without",
            remedy="Leave the option out, or use -O.",
        )
