"""Standard streams that are closed or full, and Ctrl-C at times when it would break something."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

READER_GONE = 141  # the status that a shell reports where `| head` has closed the pipe


def open_closed() -> None:
    """Streams that the caller has closed lead nowhere, and no other file takes their numbers."""
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, flags)
            setattr(sys, name, os.fdopen(handle, "r" if name == "stdin" else "w"))


def abandon() -> None:
    """Drop output that cannot be written: Python would print a traceback at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C comes when the body ends: PyTorch aborts where it is interrupted in its import."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
