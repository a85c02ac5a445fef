"""A Dask cluster in processes of this machine, and candidates that take a while there."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from neuron_cpu.oracle import forms
from tests.conftest import REPOSITORY

START_SECONDS = 120.0
CANDIDATE = """
import time
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

@nki.jit
def kernel(a):
    time.sleep({seconds})  # candidate {number}
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(a) * {number}.0)
    return out
"""


def candidate(number: int, seconds: float) -> forms.Request:
    """A request about a kernel that sleeps, other than that of every other number."""
    source = CANDIDATE.format(number=number, seconds=seconds)
    kernel = forms.Code(name="kernel", source=source)
    return forms.Request(schema=1, id=number, kernel=kernel, cases=["128x64:fp32"], seeds=[0])


class Started:
    """A scheduler and workers in processes of their own; `close` kills them and what they began.

    Attributes:
        address: of the scheduler.
        processes: the scheduler and its workers.
    """

    def __init__(self, folder: Path) -> None:
        self.processes: list[subprocess.Popen] = []
        self._folder = folder
        self._log = (folder / "dask.log").open("ab")
        told = folder / "scheduler.json"
        self._begin("dask_scheduler", {}, "--port", "0", "--scheduler-file", str(told))
        while not told.is_file() or not told.read_text():
            time.sleep(0.1)
        self.address = json.loads(told.read_text())["address"]

    def worker(self, project: Path = REPOSITORY) -> subprocess.Popen:
        """Begin a worker of one thread that finds the project in a folder."""
        where = {"PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
        return self._begin("dask_worker", where, self.address, "--nthreads", "1")

    def wait_for(self, workers: int) -> None:
        """Until so many workers have joined."""
        from distributed import Client

        with Client(self.address, set_as_default=False) as client:
            client.wait_for_workers(workers, timeout=START_SECONDS)

    def _begin(self, name: str, variables: dict[str, str], *words: str) -> subprocess.Popen:
        command = [sys.executable, "-m", f"distributed.cli.{name}", "--host", "127.0.0.1"]
        self.processes.append(
            subprocess.Popen(
                [*command, "--no-dashboard", *words],
                cwd=self._folder,  # where -m looks for modules first
                env={**os.environ, **variables},
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
        )
        return self.processes[-1]

    def kill(self, process: subprocess.Popen) -> None:
        """End a process with its nanny's child, as a machine that goes down."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in reversed(self.processes):
            self.kill(process)
        self._log.close()


@contextlib.contextmanager
def started(folder: Path, workers: int) -> Iterator[Started]:
    """A cluster of some workers while the body runs."""
    made = Started(folder)
    try:
        for _ in range(workers):
            made.worker()
        made.wait_for(workers)
        yield made
    finally:
        made.close()
