"""A cell in a process of its own: libraries keep state in modules, and a cell may take too much
time or memory."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from neuron_cpu.sandbox import limits

CUT = "Ended"  # of a cell whose process did not come to its end


def alone(limit_seconds, function, *arguments):
    """What a function says in a process and an empty folder of its own, and the processor seconds
    that this process and all below it took."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_say, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    found = None
    with contextlib.suppress(EOFError):
        ended = mine.poll(limit_seconds)
        found = mine.recv() if ended else (f"{CUT}: after {limit_seconds} s", limit_seconds)
    process.kill()
    process.join()
    return found or (f"{CUT}: the process ended with status {process.exitcode}", 0.0)


def _say(out, function, arguments):
    faulthandler.enable()
    limits.adopt_orphans()  # a driver's workers outlive it for a moment, and their times count
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        told = function(*arguments)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
    out.send((told, round(sum(os.times()[:4]), 1)))
