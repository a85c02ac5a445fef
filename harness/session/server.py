"""The server that submissions' processes are forked from: everything slow, nothing of theirs."""

import importlib
import signal

from neuron_cpu import limits

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's
limits.adopt_orphans()  # what a submission forks stays findable when its process ends
importlib.import_module("harness.session.preload")
