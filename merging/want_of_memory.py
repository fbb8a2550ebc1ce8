"""want_of_memory: a run that ran out of memory says first what the user can change."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from merging.address_space import space_ran_out, told_limit
from merging.errors import MergingError

if TYPE_CHECKING:
    from merging.data.task import Examples, Task

_SIGNS = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "cuda error: out of memory",
    "std::bad_alloc",
    "failed to map segment",  # of a library that is to be loaded
    "can't start new thread",  # whose stack is memory too
)
_ALLOW = "Allow more (`ulimit -v unlimited`), and run it again: what is finished is kept."


@contextmanager
def want_of_memory(tasks: Mapping[str, Task]) -> Iterator[None]:
    """Raise MergingError for any failed allocation, with the longest example, their number and the batch."""
    try:
        yield
    except Exception as error:
        if not _is_of_memory(error):
            raise
        if limit := _limit():
            raise MergingError(f"out of memory: {limit}{_examples(tasks)}", remedy=_ALLOW) from error
        raise MergingError(f"out of memory{_examples(tasks)}", remedy=_remedy(tasks)) from error


@contextmanager
def telling_of_memory(*others: type[BaseException]) -> Iterator[None]:
    """Raise MergingError for any failed allocation, in a run or not, and for whatever failed when the address
    space was used up. An error that tells of it already is left as it is, and so are `others`."""
    try:
        yield
    except others:
        raise
    except Exception as error:
        if isinstance(error, MergingError) and error.remedy:
            raise
        limit = _limit()
        if not (_is_of_memory(error) or (limit and not isinstance(error, MergingError))):
            raise
        what = f"out of memory: {limit}" if limit else "out of memory"
        remedy = _ALLOW if limit else _remedy({})
        raise MergingError(what, remedy=remedy) from error


def longest(examples: Examples | None) -> int:
    """Tokens of the longest example; 0 where they are no tokens."""
    batches = examples.batches() if examples is not None else ()
    if not len(batches) or "input_ids" not in batches[0]:
        return 0
    return max(int(batch["input_ids"].shape[1]) for batch in batches)


def _is_of_memory(error: BaseException) -> bool:
    """Whether it is, or was caused by, a failed allocation."""
    torch = sys.modules.get("torch")  # which may be what could not be loaded
    kinds = (MemoryError, getattr(torch, "OutOfMemoryError", MemoryError))
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, kinds) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return True
        told = isinstance(cause, RuntimeError | ImportError)
        if told and any(sign in str(cause).lower() for sign in _SIGNS):
            return True
        cause = cause.__cause__
    return False


def _limit() -> str:
    """The limit on address space, where it is that which ran out."""
    return told_limit() if space_ran_out() else ""


def _examples(tasks: Mapping[str, Task]) -> str:
    """The task whose batches are largest."""
    sizes = {
        name: (longest(one.calibration), min(one.calibration.batch_size, len(one.calibration)))
        for name, one in tasks.items()
        if one.calibration is not None
    }
    if not sizes:
        return ""
    task = max(sizes, key=lambda name: max(sizes[name][0], 1) * sizes[name][1])
    length, batch = sizes[task]
    examples = tasks[task].calibration
    tokens = f"; the longest has {length} tokens" if length else ""
    return f': task "{task}" has {len(examples or ())} calibration examples, {batch} in a batch{tokens}'


def _remedy(tasks: Mapping[str, Task]) -> str:
    given = [task.calibration for task in tasks.values() if task.calibration is not None]
    fewer = 'a smaller "batch_size"' if given else ""
    shorter = 'a smaller "max_length"' if any(longest(one) for one in given) else ""
    ways = [way for way in (shorter, fewer, '"memory" in the spec, which the run then keeps to') if way]
    return f"Give {', or '.join(ways)}; `merging pipeline plan` says what each step needs."
