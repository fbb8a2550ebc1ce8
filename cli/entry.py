"""Where the command `merging` begins: it answers signals before it loads anything."""

from __future__ import annotations

import os
import sys

from . import signals


def run() -> None:
    """Ends the process with the command's exit code."""
    signals.answer_at_once()
    _open_streams()
    _speak_utf8()
    from .main import run as follow

    follow()


def _open_streams() -> None:
    """Streams that the process was started without lead nowhere: else the next file that is opened gets the
    number of one, and what is said, by libraries too, goes into it."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _speak_utf8() -> None:
    """Begin anew in Python's UTF-8 mode where it knows ASCII alone, as in a C locale."""
    if os.name != "posix" or sys.flags.utf8_mode or not sys.executable:
        return
    if sys.getfilesystemencoding().lower() in ("ascii", "us-ascii", "ansi_x3.4-1968"):
        os.environ["PYTHONUTF8"] = "1"  # of processes that this one starts
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
