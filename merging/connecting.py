"""connect: the processes of a run find each other within a time, or it ends; until then signals are heard."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch

from merging.cores import Place
from merging.errors import MergingError, Problem, SpecError

VARIABLE = "MERGING_CONNECT_SECONDS"

_USUAL = 600.0  # seconds; machines of one run may start minutes apart
_MOST = 604800.0
_TORCHRUN = "Start the processes with torchrun, which sets these; for a single process, unset WORLD_SIZE."


def processes() -> int:
    """Of how many processes the environment says that they make this run; 1 where it names no meeting place.

    Raises SpecError where what it says, as torchrun does, is incomplete or cannot be."""
    told = os.environ
    if "MASTER_ADDR" not in told or told.get("WORLD_SIZE", "1") == "1":
        return 1
    size, problems = _whole("WORLD_SIZE", 1, None), []
    if size is None:
        problems.append(_expected("WORLD_SIZE", "the number of processes"))
    elif size == 1:
        return 1
    most = None if size is None else size - 1
    if _whole("RANK", 0, most) is None:
        upto = "" if most is None else f" up to {most}"
        problems.append(_expected("RANK", f"this process's number, from 0{upto}"))
    if _whole("MASTER_PORT", 0, 65535) is None:
        problems.append(_expected("MASTER_PORT", "a port, from 0 to 65535"))
    if not told["MASTER_ADDR"]:
        problems.append(_expected("MASTER_ADDR", "the address of the process with RANK 0"))
    if "LOCAL_RANK" in told and _whole("LOCAL_RANK", 0, None) is None:
        problems.append(_expected("LOCAL_RANK", "this process's number on its machine, from 0"))
    if problems or size is None:
        raise SpecError(
            "the environment is not one of several processes", remedy=_TORCHRUN, problems=problems
        )
    return size


def connect(backend: str, patience: timedelta) -> None:
    """Make torch's group of all processes, in which each later waits for the others as long as `patience`.

    Raises MergingError where one does not come within the seconds of $MERGING_CONNECT_SECONDS. torch itself
    would wait where Python hears no signal: so it is asked only once all of them are there.
    """
    limit, told = _limit(), os.environ
    rank, size = int(told["RANK"]), int(told["WORLD_SIZE"])
    end = time.monotonic() + limit
    try:
        store = _store(rank, size, end)
        for sign in ("come", "ready"):  # twice: who came, and ended while it waited for others, is not ready
            store.add(sign, 1)
            while store.add(sign, 0) < size:
                _wait(end)
    except (RuntimeError, OSError) as error:
        why = f": {str(error).splitlines()[0]}" if str(error) else ""
        raise MergingError(
            f"the {size} processes of this run did not meet at {told['MASTER_ADDR']}:{told['MASTER_PORT']}"
            f" (number {rank} waited for up to {limit:g} s){why}",
            remedy="Start all of them together, with torchrun; for a single process, unset WORLD_SIZE. "
            f"Where they start far apart, {VARIABLE}=3600 waits an hour.",
        ) from error
    store.set_timeout(patience)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)


def share_cores(mine: Place, everyone: Sequence[Place]) -> None:
    """Let this process have no more threads than there are cores for it, beside others on the same ones: the
    threads of all would wait for each other at every operation, whatever OMP_NUM_THREADS says. Processes that
    were bound to cores of their own keep all of these."""
    sharing = sum(one.machine == mine.machine and bool(one.cores & mine.cores) for one in everyone)
    most = max(1, len(mine.cores) // max(1, sharing))
    if sharing > 1 and torch.get_num_threads() > most:
        torch.set_num_threads(most)


def _store(rank: int, size: int, end: float) -> torch.distributed.Store:
    """What all processes can reach: torchrun's, or else that of the process with rank 0."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        _until_it_answers(address, port, end)
    store = torch.distributed.TCPStore(
        address,
        port,
        size,
        serves,
        timeout=timedelta(seconds=max(1.0, end - time.monotonic())),
        wait_for_workers=False,
        multi_tenant=True,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # who came in an earlier one does not count
    return torch.distributed.PrefixStore(f"merging/{attempt}", store)


def _until_it_answers(address: str, port: int, end: float) -> None:
    while True:
        try:
            with socket.create_connection((address, port), timeout=1.0):
                return
        except OSError as error:
            _wait(end, str(error))


def _wait(end: float, why: str = "") -> None:
    if time.monotonic() > end:
        raise TimeoutError(why)
    time.sleep(0.05)


def _limit() -> float:
    told = os.environ.get(VARIABLE, "")
    if not told:
        return _USUAL
    try:
        limit = float(told)
    except ValueError:
        limit = math.nan
    if not 0 < limit <= _MOST:
        raise SpecError(
            f'environment: {VARIABLE} is "{told}", expected seconds, from more than 0 up to {_MOST:.0f}',
            remedy=f"Unset it to wait {_USUAL:.0f} s for the other processes.",
        )
    return limit


def _whole(variable: str, least: int, most: int | None) -> int | None:
    """The number that the variable gives; None where it is none of these."""
    told = os.environ.get(variable, "")
    if not (told.isascii() and told.isdecimal()) or len(told) > 9:
        return None
    number = int(told)
    return number if number >= least and (most is None or number <= most) else None


def _expected(variable: str, what: str) -> Problem:
    told = os.environ.get(variable)
    found = "is not set" if told is None else f'is "{told}"'
    return Problem(variable, f"{found}, expected {what}")
