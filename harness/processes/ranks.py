"""The driver under torchrun: rank 0 runs the mode, and the other ranks repeat its orders to
submissions.

Rank 0 writes its orders into torchrun's store: a process to start, a function to call there, a
process to end. Every other rank reads that, does the same in a process of its own, whose
collectives meet rank 0's, and writes what became of it. So each rank has its limits and its
confinement, and only rank 0 reads prompts, keeps the clock, and writes results.

The store is open to every process of its machine, submissions included. The drivers write JSON with
a digest under a key, which rank 0 gives to the others before anything else runs.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import itertools
import math
import os
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Optional

from harness import sdk
from harness.errors import UserError, is_refusal
from harness.processes.worker import Answer, Job
from harness.processes.workers import OnEvent, Process, Stop, SubmissionFailed, Worker, Workers
from harness.settings import Settings
from neuron_cpu.files import temporary_sibling
from neuron_cpu.plain import Form
from neuron_cpu.sandbox.torchrun import Place

LOOK_SECONDS = 0.05  # between two looks into the store; to wait in it would hear no signal
DIGEST_BYTES = hashlib.sha256().digest_size
OTHERS_SECONDS = 5.0  # for the reasons of others, once rank 0's own call has failed
CONSEQUENCE = "Rank "  # begins what a rank says that failed because of another one
INTERRUPTED = 128 + signal.SIGINT


def _is_record(kind: type) -> bool:
    """Whether a class of this project holds data and does nothing else."""
    own = kind.__module__.split(".")[0] in ("harness", "neuron_cpu")
    return own and (dataclasses.is_dataclass(kind) or issubclass(kind, (tuple, Enum)))


FORM = Form(_is_record)


@dataclass(frozen=True)
class Order:
    """An order to a rank about its process number `process`; None ends the run. The process starts
    for the job `start`, or calls `function` with `arguments`; without both it ends.
    """

    process: Optional[int] = None
    start: Optional[Job] = None
    function: Optional[str] = None
    what: str = ""
    arguments: Optional[dict[str, Any]] = None


class Store:
    """Orders by number and their outcomes, in torchrun's key-value store. A UserError says that a
    stranger has written there.
    """

    def __init__(self, place: Place) -> None:
        import torch.distributed as dist  # takes seconds that runs without torchrun are spared

        with _told_of_torchrun():
            self._store: Any = dist.TCPStore(place.address, place.port, is_master=False)
            self._key = self._agreed(place)

    def _agreed(self, place: Place) -> bytes:
        """The key of this run, which the store forgets once all ranks have it."""
        if place.rank:
            key = bytes(self._waited("key", math.inf))
            self._store.add(_name("keyed"), 1)
            return key
        key = secrets.token_hex().encode()
        self._store.set(_name("key"), key)
        deadline = time.monotonic() + place.timeout_seconds
        while self._store.add(_name("keyed"), 0) < place.size - 1:
            if time.monotonic() > deadline:
                raise UserError(
                    f"Not all of {place.size} ranks have joined within {place.timeout_seconds:g} "
                    "s; see what torchrun says of the others."
                )
            time.sleep(LOOK_SECONDS)
        self._store.delete_key(_name("key"))
        return key

    def write(self, value: Any, number: int, rank: int = 0) -> None:
        """An order (rank 0), or a rank's outcome of it."""
        data, name = FORM.dumps(value), f"{number}/{rank}"
        with _told_of_torchrun():
            self._store.set(_name(name), self._digest(name, data) + data)

    def read(self, deadline: float, number: int, rank: int = 0) -> Any:
        """Wait for an entry and read it; a TimeoutError at `deadline` (monotonic)."""
        name = f"{number}/{rank}"
        with _told_of_torchrun():
            found = self._waited(name, deadline)
        digest, data = found[:DIGEST_BYTES], found[DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._digest(name, data)):
            raise UserError(
                f"Somebody else has written into torchrun's store (entry {name}); start the ranks "
                "where only you reach it."
            )
        return FORM.loads(data)

    def _waited(self, name: str, deadline: float) -> bytes:
        while not self._store.check([_name(name)]):
            if time.monotonic() > deadline:
                raise TimeoutError(name)
            time.sleep(LOOK_SECONDS)
        return self._store.get(_name(name))

    def _digest(self, name: str, data: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b" " + data, hashlib.sha256)


@contextlib.contextmanager
def _told_of_torchrun() -> Iterator[None]:
    """The store lives in torchrun's own process, on the machine of rank 0."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(
            "torchrun, which has started the ranks, has ended or cannot be reached; start the run "
            "again, --resume goes on with one of test.py."
        ) from error


def _name(entry: str) -> str:
    return f"main.py/{entry}"


class Leader:
    """Rank 0's end of the line to the others."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._store = Store(place)
        self._orders, self._processes = itertools.count(), itertools.count()

    def process(self, job: Job) -> Worker:
        """A process for a job on every rank; this is rank 0's."""
        return OnEveryRank(self, next(self._processes), job)

    def order(self, order: Order) -> int:
        """Write an order to the other ranks; returns the number under which they report."""
        number = next(self._orders)
        self._store.write(order, number)
        return number

    def failures(self, number: int, deadline: float) -> list[str]:
        """The reasons of the ranks that failed at an order; TimeoutError where a rank does not
        answer."""
        outcomes = {
            rank: self._store.read(deadline, number, rank) for rank in range(1, self.place.size)
        }
        return [f"{why.rstrip('.')} (rank {rank})." for rank, why in outcomes.items() if why]


class OnEveryRank(Process):
    """Rank 0's process for a job, with one on every other rank that gets the same orders."""

    def __init__(self, leader: Leader, number: int, job: Job) -> None:
        assert job.limits is not None
        self._leader, self._number, self._seconds = leader, number, job.limits.wall_seconds
        place = replace(
            leader.place, group=f"process {number}", timeout_seconds=job.limits.wall_seconds
        )
        job = replace(job, place=place)
        leader.order(Order(number, start=job))
        super().__init__(job)

    def _call(
        self, function: str, what: str, on_event: Optional[OnEvent], stop: Stop, arguments: dict
    ) -> Answer:
        deadline = time.monotonic() + self._seconds
        order = Order(self._number, function=function, what=what, arguments=arguments)
        number = self._leader.order(order)
        try:
            answer = super()._call(function, what, on_event, stop, arguments)
        except SubmissionFailed as error:
            if not str(error).startswith(CONSEQUENCE):
                raise
            raise SubmissionFailed(self._cause(number) or str(error)) from error
        try:
            failures = self._leader.failures(number, deadline)
        except TimeoutError as error:
            raise SubmissionFailed(
                f"{what}: a rank has not answered within {self._seconds:g} s; --time-limit changes "
                "that."
            ) from error
        if failures:
            raise SubmissionFailed(_first_cause(failures))
        return answer

    def _cause(self, number: int) -> Optional[str]:
        """The reason of another rank that failed first."""
        try:
            failures = self._leader.failures(number, time.monotonic() + OTHERS_SECONDS)
        except TimeoutError:
            return None
        return _first_cause(failures) if failures else None

    def close(self) -> None:
        if not self.ended:
            self._leader.order(Order(self._number))
        super().close()


def _first_cause(failures: list[str]) -> str:
    causes = [failure for failure in failures if not failure.startswith(CONSEQUENCE)]
    return (causes or failures)[0]


_leader: Optional[Leader] = None


@contextlib.contextmanager
def leading(place: Optional[Place]) -> Iterator[None]:
    """Rank 0 leads the others inside the block; at its end, however it comes, their run ends."""
    global _leader
    if place is None:
        yield
        return
    _leader = Leader(place)
    try:
        yield
    finally:
        with contextlib.suppress(UserError):  # torchrun itself has ended
            _leader.order(Order())
        _leader = None


def workers() -> Workers:
    """The processes of a new session: on every rank where this process leads others."""
    return Workers() if _leader is None else Workers(_leader.process)


def over_ranks(settings: Settings, place: Optional[Place]) -> Settings:
    """The settings of a run over torchrun's ranks; a UserError where it cannot be one."""
    if place is None:
        return settings
    if not sdk.platform().simulates:
        raise UserError(
            "torchrun starts ranks as processes, which only the stand-in for the SDK takes; start "
            "main.py by itself, and the SDK starts the ranks."
        )
    if not settings.isolate:
        raise UserError(
            "--no-isolate runs the submission in the driver's process, and under torchrun each "
            "rank needs one of its own; leave it out, or start main.py without torchrun."
        )
    if settings.tp_degree not in (None, place.size):
        raise UserError(
            f"--tp-degree must be {place.size}, as torchrun has started {place.size} processes, "
            f"got {settings.tp_degree}; leave it out."
        )
    return replace(settings, tp_degree=place.size)


def follow(place: Place) -> int:
    """Do what rank 0 orders until it ends the run; exit status 0, or that of an interrupt.

    This rank prints nothing; rank 0 does.
    """
    rank = Rank(place)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            store = Store(place)
            for number in itertools.count():
                order = store.read(math.inf, number)
                if order.process is None:
                    return 0
                store.write(rank.outcome(order), number, place.rank)
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        rank.close()


class Rank:
    """The processes of a rank other than 0."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._running: dict[Optional[int], Process] = {}
        Workers().prepare()

    def outcome(self, order: Order) -> Optional[str]:
        """Carry out an order; why it failed in a sentence, None where it did not."""
        try:
            self._carry_out(order)
        except Exception as error:
            told = str(error) if is_refusal(error) else f"{type(error).__name__}: {error}"
            return " ".join(told.split())
        return None

    def _carry_out(self, order: Order) -> None:
        if order.start is not None:
            self._running[order.process] = Process(self._own(order.start))
        elif order.function is not None:
            process = self._running.get(order.process)
            if process is None:
                raise UserError(f"{order.what}: this rank has no process for the submission.")
            process.call(order.function, order.what, **(order.arguments or {}))
        elif order.process in self._running:
            self._running.pop(order.process).close()

    def _own(self, job: Job) -> Job:
        """Rank 0's job as this rank does it: a folder beside rank 0's, a place of its own."""
        assert job.place is not None
        if job.source is not None and not Path(job.source).is_file():
            raise UserError(f"{job.source} is not on the machine of rank {self._place.rank}.")
        scratch = temporary_sibling(job.scratch.parent / "work")
        return replace(job, scratch=scratch, place=replace(job.place, rank=self._place.rank))

    def close(self) -> None:
        """End all processes."""
        for process in self._running.values():
            process.close()
