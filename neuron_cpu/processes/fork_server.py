"""What a fork server preloads first, before anything slow: it adopts orphans and keeps quiet."""

import signal
import warnings

from .. import ensure_sdk
from . import limits

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
limits.adopt_orphans()  # what a process of others leaves behind stays findable when it ends
# Adopted orphans end, too, which multiprocessing remarks on.
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
ensure_sdk()
