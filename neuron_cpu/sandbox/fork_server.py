"""The first preload of a fork server, before slow modules: it adopts orphans and prints nothing."""

import atexit
import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import time
import warnings

from .. import ensure_sdk
from . import limits

_OWN, _LOOK_SECONDS = os.getpid(), 0.5


def _end_with_starter(*_: object) -> None:
    if os.getppid() != _STARTER:
        _remove_folder()
        os._exit(0)


def _asked() -> tuple[str, int]:
    """The folder of the socket that this is asked on, and who has made both; it may have ended."""
    with contextlib.suppress(OSError, TypeError, ValueError, AttributeError):
        listener = re.search(r"main\((\d+),", sys.orig_argv[-1])  # as multiprocessing calls it
        with socket.socket(fileno=os.dup(int(listener[1]))) as asked:  # type: ignore[index]
            starter = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4)  # Linux
            return os.path.dirname(asked.getsockname()), int.from_bytes(starter, sys.byteorder)
    return "", os.getppid()


def _remove_folder() -> None:
    """Remove the folder if the starter was killed; otherwise the starter does."""
    deadline = time.monotonic() + _LOOK_SECONDS  # its files are closed before it is gone
    while os.getppid() == _STARTER and time.monotonic() < deadline:
        time.sleep(0.01)
    starter_ended = os.getpid() == _OWN and os.getppid() != _STARTER
    if starter_ended and os.path.basename(_FOLDER).startswith("pymp-"):
        shutil.rmtree(_FOLDER, ignore_errors=True)


_FOLDER, _STARTER = _asked()
atexit.register(_remove_folder)

# While it imports what is slow, it does not see its connection close.
signal.signal(signal.SIGALRM, _end_with_starter)
signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
limits.close_memory()  # what its processes are forked from is no file of theirs
limits.adopt_orphans()  # what a process of others leaves behind stays findable when it ends
# Adopted orphans end, too, which multiprocessing remarks on.
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
ensure_sdk()
