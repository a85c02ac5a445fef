"""Rewrites the table of lab/docs/oracle_measured.md: candidates a second on more and more workers.

    python -m lab.cluster_speed [--candidates N]

Scheduler and workers are processes of this machine. A candidate sleeps a second while it is traced,
so that workers need few processors. Two minutes.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from lab import NOTES, ROOT, pages
from neuron_cpu import cluster
from neuron_cpu.oracle import forms
from neuron_cpu.oracle.serve import Oracle

PAGE = NOTES / "oracle_measured.md"
WORKERS = 1, 2, 4
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

    def worker(self, project: Path = ROOT) -> subprocess.Popen:
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


def rate(address: str, count: int) -> float:
    """Candidates a second, once every worker has judged some."""
    with contextlib.ExitStack() as opened:
        joined = opened.enter_context(cluster.joined(address))
        jobs = cluster.jobs(None, joined)
        oracle = opened.enter_context(contextlib.closing(Oracle(jobs, cluster=joined)))
        pool = opened.enter_context(ThreadPoolExecutor(jobs))
        list(pool.map(lambda n: oracle.one(candidate(n, 0.0)), range(4 * jobs)))
        began = time.monotonic()
        answers = list(pool.map(lambda n: oracle.one(candidate(1000 + n, 1.0)), range(count)))
        took = time.monotonic() - began
    failed = [answer for answer in answers if answer["outcome"] != "passed"]
    if failed:
        raise SystemExit(f"a candidate failed: {failed[0]['sentence']}")
    return count / took


def table(count: int) -> str:
    """A row for each number of workers."""
    rows = ["| Workers | Candidates a second | of linear |", "|--:|--:|--:|"]
    one = 0.0
    for workers in WORKERS:
        with TemporaryDirectory() as folder, started(Path(folder), workers) as made:
            found = rate(made.address, count * workers)
        one = one or found
        rows.append(f"| {workers} | {found:.2f} | {found / workers / one:.2f} |")
    load = os.getloadavg()[0]
    return "\n".join([*rows, "", f"{os.cpu_count()} processors, at a load of {load:.0f}."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--candidates", type=int, default=12, help="for each worker (12)")
    made = table(parser.parse_args().candidates)
    print(made)
    pages.publish(PAGE, "cluster", made)
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
