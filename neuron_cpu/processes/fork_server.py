"""What a fork server preloads first, before anything slow: it adopts orphans and keeps quiet."""

import os
import signal
import warnings

from .. import ensure_sdk
from . import limits

_STARTER, _LOOK_SECONDS = os.getppid(), 0.5


def _end_with_starter(*_: object) -> None:
    if os.getppid() != _STARTER:
        os._exit(0)


# While it imports what is slow, it does not see its connection close.
signal.signal(signal.SIGALRM, _end_with_starter)
signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
limits.adopt_orphans()  # what a process of others leaves behind stays findable when it ends
# Adopted orphans end, too, which multiprocessing remarks on.
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
ensure_sdk()
