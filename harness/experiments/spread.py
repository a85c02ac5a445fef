"""Prompts of a benchmark run spread over the workers of a Dask cluster.

Each prompt of each submission is a task. A worker hands its tasks to a process of its own
(`remote`), because submissions are started and ended by it, which a process of Dask must not do.
When a worker is lost, the scheduler gives its tasks to others; a task that was done counts once.
"""

import functools
import hashlib
import importlib.util
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

import neuron_cpu
from harness import console, sdk
from harness.errors import UserError
from harness.experiments.remote import Outcome, Task, sizes_of
from harness.figures import evaluation
from harness.figures.baseline import Case
from harness.inputs.submission import REPOSITORY, sources
from harness.modes import evaluate_all
from harness.modes.evaluate_all import Run
from harness.settings import Settings

CONNECT_SECONDS = 20  # for the scheduler to answer
WORKER_SECONDS = 60  # without a single worker, after which the run is given up
LOOK_SECONDS = 1.0
MOST_TRIES = 3  # of a task whose process ends before it answers
INSTALL = 'pip install "distributed>=2024.5"'


def run(settings: Settings) -> int:
    """`--mode evaluate_all --workers`: the same run, its prompts evaluated on the workers."""
    assert settings.workers is not None
    return evaluate_all.run(settings, functools.partial(_on_workers, settings.workers))


def _on_workers(address: str, runs: Sequence[Run]) -> None:
    """Evaluate what is missing of all runs on a cluster, and write results as they come."""
    works = [Work(run, case) for run in runs for case in run.missing]
    if not works:
        return
    with console.step("Evaluating prompts", total=len(works)) as step:
        for run, case, outcome in evaluated(address, works):
            if outcome.refusal is not None and len(runs) == 1:
                raise UserError(outcome.refusal)
            if outcome.refusal is not None:
                result = evaluate_all.refused(run.session, case, outcome.refusal)
            else:
                result = evaluation.from_dict(outcome.result)
            evaluate_all.write(run, result)
            step.advance()
        step.note("Evaluated prompts")


class Work(NamedTuple):
    """A case of a run."""

    run: Run
    case: Case


def evaluated(address: str, works: Sequence[Work]) -> Iterator[tuple[Run, Case, Outcome]]:
    """Each work's run and case with its outcome, as they come.

    `address` is a scheduler's, or the number of workers of a cluster that is made here for the
    length of the run. A UserError where there are no workers, or a task has ended several.
    """
    if importlib.util.find_spec("distributed") is None:
        raise UserError(f"--workers needs Dask, which is not installed; run `{INSTALL}`.")
    code = code_digest()
    tasks = [_task(work, code) for work in works]
    with _client(address) as client:
        futures = {
            client.submit(
                carry_out, task, key=_key(task, number), pure=False, retries=MOST_TRIES
            ): work
            for number, (task, work) in enumerate(zip(tasks, works))
        }
        for work, outcome in _as_they_come(client, futures):
            yield work.run, work.case, outcome


def _task(work: Work, code: str) -> Task:
    session, settings = work.run.session, work.run.session.settings
    places: dict[str, Any] = {}  # the process beside a worker runs in another folder
    if settings.model_path is not None and Path(settings.model_path).exists():
        places["model_path"] = Path(settings.model_path).resolve()
    if settings.compiled_model_path is not None:
        places["compiled_model_path"] = settings.compiled_model_path.resolve()
    return Task(
        settings=replace(settings, prompts=(), prompt_notes=(), **places),
        submission=session.source.name,
        sources=sources(session.source),
        checkpoint=sizes_of(session.model.path),
        code=code,
        environment={"NEURON_CPU_NXDI": sdk.version()},
        case=work.case,
    )


def _key(task: Task, number: int) -> str:
    """Names that no other run on the cluster has: results of equal keys would be taken for done."""
    return f"{task.submission}-prompt-{task.case.index}-{number}-{os.getpid()}-{time.time_ns()}"


def code_digest() -> str:
    """The sources that evaluate: two machines with the same have the same project."""
    digest = hashlib.sha256(sdk.identity().encode())
    for path in sorted((REPOSITORY / "harness").rglob("*.py")):
        digest.update(str(path.relative_to(REPOSITORY)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@contextmanager
def _client(address: str) -> Iterator[Any]:
    """A connection to the scheduler, which has at least one worker."""
    from distributed import Client, LocalCluster
    from distributed import TimeoutError as Late  # not Python's own before 3.11

    logging.getLogger("distributed").setLevel(logging.ERROR)  # it tells of every connection
    own: Optional[Any] = None
    target: Any = address
    if address.isdigit():
        own = target = LocalCluster(
            n_workers=int(address), threads_per_worker=1, dashboard_address=None, silence_logs=50
        )
    try:
        try:
            client = Client(target, timeout=CONNECT_SECONDS)
        except (OSError, ValueError) as error:
            raise UserError(
                f"No scheduler of Dask answers at {address} within {CONNECT_SECONDS} s "
                f"({str(error)[:80].rstrip('.')}); start one with `dask scheduler`, or give "
                "--workers a number."
            ) from error
        with client:
            try:
                client.wait_for_workers(1, timeout=WORKER_SECONDS)
            except Late as error:
                raise _no_workers(address) from error
            workers = len(client.scheduler_info()["workers"])
            console.say(f"Spreading prompts over {workers} workers at {address}")
            yield client
    finally:
        if own is not None:
            own.close()


def _no_workers(where: str) -> UserError:
    return UserError(
        f"The cluster at {where} has had no worker for {WORKER_SECONDS} s, expected at least one; "
        f"start some with `PYTHONPATH={REPOSITORY} dask worker ADDRESS --nthreads 1` and give "
        "--resume."
    )


def _as_they_come(client: Any, futures: dict[Any, Work]) -> Iterator[tuple[Work, Outcome]]:
    from distributed import TimeoutError as Late
    from distributed import wait

    left, seen = set(futures), time.monotonic()
    known: set[str] = set()
    while left:
        try:
            done = wait(list(left), timeout=LOOK_SECONDS, return_when="FIRST_COMPLETED").done
        except Late:
            done = set()
        working = set(client.scheduler_info()["workers"])
        for lost in sorted(known - working):
            console.say(f"Worker {lost} is lost; others do its prompts ({len(working)} are left).")
        known = working
        if done or working:
            seen = time.monotonic()
        elif time.monotonic() - seen > WORKER_SECONDS:
            raise _no_workers(str(client.scheduler_info().get("address", "the given address")))
        for future in done:
            left.discard(future)
            yield futures[future], _outcome(future, futures[future])


def _outcome(future: Any, work: Work) -> Outcome:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, ModuleNotFoundError):
        raise UserError(
            f"A worker cannot import this project ({error}); start it with PYTHONPATH={REPOSITORY}."
        )
    raise UserError(
        f"Prompt {work.case.index} of {work.run.session.submission.name} was given up: "
        f"{' '.join(str(error).split())[:300].rstrip('.')}; --resume goes on with the others."
    )


# --- on the worker --------------------------------------------------------------------------------
def carry_out(task: Task) -> Outcome:
    """Do a task in the process beside this worker, which is started where there is none."""
    neuron_cpu.ensure_sdk()
    if code_digest() != task.code:
        raise RuntimeError("the worker has other sources of this project; update its checkout")
    return _beside.ask(task)


class _Beside:
    """The process beside a worker, which does one task at a time, whatever threads there are."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: Optional[subprocess.Popen] = None
        self._environment: Optional[dict[str, str]] = None

    def ask(self, task: Task) -> Outcome:
        with self._turn:
            process = self._running(task.environment)
            assert process.stdin is not None and process.stdout is not None
            try:
                pickle.dump(task, process.stdin)
                process.stdin.flush()
                answer = pickle.load(process.stdout)
            except (EOFError, OSError) as error:
                status = process.wait()
                raise RuntimeError(f"the process beside a worker ended with {status}") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _running(self, environment: dict[str, str]) -> subprocess.Popen:
        """The process, with an environment that results may depend on."""
        process = self._process
        if process is not None and process.poll() is None and self._environment == environment:
            return process
        if process is not None:
            process.kill()
        self._environment = environment
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.experiments.remote"],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # status lines of all workers at once tell nobody anything
        )
        return self._process


_beside = _Beside()
