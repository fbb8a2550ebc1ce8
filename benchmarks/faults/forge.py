"""Children of a warmed-up process: runs of the command that start at once, and that a fault can strike."""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STEPS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}
_DEADLINE = 60.0  # seconds of the processor that a run of a tiny model may take; beyond, it hangs
_PATIENCE = 10 * _DEADLINE  # seconds in all, as others may be at work
_BEGUN = "\0"  # what a child says first, once it answers signals


@dataclass(frozen=True)
class Ended:
    """A child that is over. `code` as subprocess has it: negative for the signal that ended it."""

    code: int
    seconds: float
    said: str  # stdout and stderr together
    hung: bool = False  # it had to be ended
    began: bool = True  # it had come so far as to answer signals by itself


@dataclass(frozen=True)
class Blow:
    """A signal, `after` so many seconds or `at` this step on files; neither: the child is left in peace."""

    sign: signal.Signals = signal.SIGKILL
    after: float | None = None
    at: int | None = None


PEACE = Blow()


def entry() -> Any:
    """The command's module; imported once here, it is there for all children."""
    return importlib.import_module("merging_cli.main")


def command(words: Sequence[str], blow: Blow = PEACE, act: Callable[[int], Any] | None = None) -> Ended:
    """`merging WORDS` in a fork of this process, which has imported everything before.

    `act` is called in the child before each of its steps, with the step's number, from 1. Steps are calls
    that open, write, sync, move or remove files.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # else the child's collector writes on, and so copies, every page of ours
    start = time.monotonic()
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)  # more than it says
    child = os.fork()
    if not child:
        _run(words, write, blow, act)
    gc.unfreeze()
    os.close(write)
    code, hung = _awaited(child, start, blow)
    with os.fdopen(read, encoding="utf-8", errors="replace") as said:
        text = said.read()
        return Ended(code, time.monotonic() - start, text.removeprefix(_BEGUN), hung, text.startswith(_BEGUN))


def steps(words: Sequence[str]) -> int:
    """How many steps on files an undisturbed run takes."""
    read, write = os.pipe()
    ended = command(words, act=lambda step: os.write(write, b"."))
    os.close(write)
    with os.fdopen(read, "rb") as dots:
        taken = len(dots.read())
    if ended.code:
        raise RuntimeError(f"the undisturbed run ended with {ended.code}: {ended.said[-600:]}")
    return taken


def _awaited(child: int, start: float, blow: Blow) -> tuple[int, bool]:
    """The child's code, and whether it hung."""
    struck = blow.after is None
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), False
        passed = time.monotonic() - start
        if not struck and blow.after is not None and passed >= blow.after:
            os.kill(child, blow.sign)
            struck = True
        if passed > _DEADLINE and (passed > _PATIENCE or _processor_time(child) > _DEADLINE):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL, True
        time.sleep(0.0005 if not struck else 0.002)


def _processor_time(child: int) -> float:
    """Seconds; the child has not been waited for."""
    times = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def _run(words: Sequence[str], said: int, blow: Blow, act: Callable[[int], Any] | None) -> None:
    """In the child; does not return."""
    code = 70
    try:
        # As the command itself does when it has begun:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(said, _BEGUN.encode())
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        if blow.at is not None:
            _at_each_step(lambda step: os.kill(os.getpid(), blow.sign) if step == blow.at else None)
        elif act is not None:
            _at_each_step(act)
        sys.argv = ["merging", *words]
        entry().run()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        code = 130  # before the command has begun, or after its end
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _at_each_step(act: Callable[[int], Any]) -> None:
    taken, acting = 0, False

    def step() -> None:
        nonlocal taken, acting
        if not acting:  # what it does itself is no step
            taken, acting = taken + 1, True
            try:
                act(taken)
            finally:
                acting = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STEPS and not (event == "open" and str(arguments[0]).endswith((".py", ".pyc"))):
            step()

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keys: Any) -> Any:
            step()
            return call(*arguments, **keys)

        return counted

    sys.addaudithook(hook)
    for name in ("pwrite", "fsync"):  # of which Python tells no hook
        setattr(os, name, counting(getattr(os, name)))
