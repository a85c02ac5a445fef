"""The driver's end of the connection to submissions, which run in processes of their own. Answers
are data, and are checked where they are used. A process that exits, is killed, hangs, closes its
connection or sends something else becomes a SubmissionFailed with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import pickle
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness import console
from harness.errors import UserError, is_refusal
from harness.processes import worker
from harness.processes.worker import Answer, Host, Job
from neuron_cpu.files import remove_tree, temporary_sibling
from neuron_cpu.quoting import quoted
from neuron_cpu.sandbox import forked, limits
from neuron_cpu.sandbox.interpreter import started_safely

PRELOAD = "harness.processes.preload"
# Brings PyTorch's compiler and sympy, too, which PyTorch takes shapes of a graph with.
_OF_COMPILING = "transformers.modeling_utils"
MOST_OUTPUT_BYTES = 1 << 20  # of what one submission prints; the rest is left out
_PROCESSES = forked.Processes(multiprocessing.get_context("forkserver"))
OnEvent = Callable[[Any], None]
Stop = Callable[[], bool]


def _never() -> bool:
    return False


class SubmissionFailed(UserError):
    """The submission raised, exited, hung or broke its connection: one sentence says which."""


class Workers:
    """The processes of one session, one for each job."""

    def __init__(self) -> None:
        self._open: list[tuple[Job, Worker]] = []

    def prepare(self, compiled: bool = False) -> None:
        """Begin to import the slow modules, in the server that processes are forked from: without
        those that compiling takes (1.2 s and 106 MiB) where the model is `compiled`."""
        with started_safely():
            forked.context(PRELOAD, *([] if compiled else [_OF_COMPILING]))
            forkserver.ensure_running()

    def worker(self, job: Job, near: Path) -> Worker:
        """The process that does `job`; it may write to a folder of its own beside `near` only."""
        for known, running in self._open:
            if known == job and not running.ended:
                return running
        _tell_isolation(job)
        self.prepare()
        alone = not near.parent.exists()
        made = replace(job, scratch=temporary_sibling(near), alone=alone)
        running = InProcess(made) if made.limits is None else Process(made)
        self._open.append((job, running))
        return running

    def close(self) -> None:
        """End all of them."""
        for _, running in self._open:
            running.close()
        self._open.clear()


def _tell_isolation(job: Job) -> None:
    """One line, once, where a submission is not confined; a UserError where that was required."""
    why = limits.missing()
    if job.limits is None:
        why = "--no-isolate runs it in the driver's own process"
    elif not job.confined:
        why = "the SDK's compiler and runtime write to places of their own"
    if why and job.settings.require_isolation:
        raise UserError(
            f"--require-isolation: the submission is not confined here ({why}); leave it out for "
            "submissions that you trust."
        )
    if why and job.limits is not None and not _told:
        console.say(f"The submission is not confined as it should be: {why}.")
        _told.append(why)


_told: list[str] = []


class Worker:
    """Does a job; `call` runs one function of the harness there."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def call(
        self,
        function: str,
        what: str,
        on_event: OnEvent | None = None,
        stop: Stop = _never,
        **arguments: Any,
    ) -> Answer:
        """Run `module:name`; `what` names the work in messages. Once `stop`, asked after each
        event, is true, a generation ends with its current step. A UserError is a refusal, a
        SubmissionFailed any other fault there.
        """
        return self._call(function, what, on_event, stop, arguments)

    def _call(
        self, function: str, what: str, on_event: OnEvent | None, stop: Stop, arguments: dict
    ) -> Answer:
        raise NotImplementedError

    def close(self) -> None:
        """End it and remove its folder."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Whether `close` was called, by the driver or after a fault."""
        return not self._finalizer.alive

    _finalizer: weakref.finalize


class InProcess(Worker):
    """A worker in the driver's own process, for debuggers: no limits and no protection."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        importlib.import_module(PRELOAD)
        self._events: OnEvent = lambda _: None
        self._stop: Stop = _never
        self._host = Host(job, lambda event: self._events(event), lambda: self._stop())
        self._finalizer = weakref.finalize(self, _remove_folder, job)

    def _call(
        self, function: str, what: str, on_event: OnEvent | None, stop: Stop, arguments: dict
    ) -> Answer:
        self._events, self._stop = on_event or (lambda _: None), stop
        try:
            with self._host.told_as_the_submission(what):
                return worker.run(self._host, function, arguments)
        except Exception as error:
            if not is_refusal(error):
                raise
            raise SubmissionFailed(str(error)) from error

    def close(self) -> None:
        self._finalizer()


class Process(Worker):
    """A worker in a process of its own, under the job's limits."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        environment = dict(os.environ, TMPDIR=str(job.scratch))
        self._talk = forked.Talk(_PROCESSES, worker.main, job, environment, hears=True, prints=True)
        self._requested = 0
        output = self._talk.output
        self._printer = threading.Thread(target=_print_output, args=(output,), daemon=True)
        self._printer.start()
        self._finalizer = weakref.finalize(self, _end, self._talk, job)

    def _call(
        self, function: str, what: str, on_event: OnEvent | None, stop: Stop, arguments: dict
    ) -> Answer:
        assert self.job.limits is not None
        deadline = time.monotonic() + self.job.limits.wall_seconds
        self._requested += 1
        stopping = False
        with self._told_as_the_submission(what):
            self._talk.send(pickle.dumps((self._requested, function, arguments)), deadline)
        while True:
            with self._told_as_the_submission(what):
                message = self._receive(what, deadline)
            if message.kind == worker.RESULT:
                return Answer(message.body, message.arrays)
            if message.kind == worker.EVENT and on_event is not None:
                on_event(message.body)  # what it raises is the driver's: a full disk, a closed pipe
                if not stopping and stop():
                    stopping = True
                    with self._told_as_the_submission(what):
                        self._talk.send(worker.STOP, deadline)
            elif message.kind == worker.PROGRESS:
                _show_progress(message.body)

    def _receive(self, what: str, deadline: float) -> worker.Message:
        """The next message that answers the last request and tells of no failure."""
        message = worker.receive(self._talk, deadline)
        if message.request != self._requested:
            raise worker.WireError("an answer to another request")
        if message.kind == worker.REFUSED:
            raise SubmissionFailed(_text(message.body))
        if message.kind == worker.FAILED:
            raise SubmissionFailed(f"{what}: {_text(message.body)}")
        if message.kind == worker.PROGRESS:
            _check_progress(message.body)
        elif message.kind not in (worker.EVENT, worker.RESULT):
            raise worker.WireError(f"a message of kind {message.kind!r}")
        return message

    @contextlib.contextmanager
    def _told_as_the_submission(self, what: str) -> Iterator[None]:
        """Turn faults of the connection or of a message into a SubmissionFailed."""
        try:
            yield
        except TimeoutError as error:
            self.close()
            assert self.job.limits is not None
            raise SubmissionFailed(
                f"{what}: no answer within {self.job.limits.wall_seconds:g} s; --time-limit "
                "changes that."
            ) from error
        except worker.WireError as error:
            self.close()
            raise SubmissionFailed(
                f"{what}: its process sent no valid answer ({error}); nothing but the driver's "
                "own code may write to its connection."
            ) from error
        except (EOFError, ConnectionError, OSError) as error:
            bounds = self.job.limits
            assert bounds is not None
            said = forked.end_in_words(self._talk.process, bounds, "--cpu-limit")
            self.close()
            raise SubmissionFailed(f"{what}: {said}.") from error

    def close(self) -> None:
        self._finalizer()
        self._printer.join(5)


def _end(talk: forked.Talk, job: Job) -> None:
    """End a process and its children, and remove its folder."""
    try:
        talk.end()
    finally:  # an end of the driver may interrupt it
        _remove_folder(job)


def _remove_folder(job: Job) -> None:
    """Remove a process's folder, and the one around it where that was made for it."""
    remove_tree(job.scratch)
    if job.alone:
        with contextlib.suppress(OSError):  # it holds something else by now
            job.scratch.parent.rmdir()


def _print_output(output: Connection) -> None:
    """Print a submission's output to standard error, without control characters and up to a bound:
    standard output is for results."""
    left, line = MOST_OUTPUT_BYTES, b""  # whole lines only: status lines come in between
    with contextlib.suppress(OSError, EOFError):
        while data := os.read(output.fileno(), 65536):
            whole, newline, line = (line + data[: max(left, 0)]).rpartition(b"\n")
            if len(line) > 65536:
                whole, line = whole + newline + line, b""
            _print(whole + newline)
            if 0 < left <= len(data):
                _print(line)
                line = b""
                console.say("... the submission prints more than is shown.")
            left -= len(data)
    _print(line + b"\n" if line else b"")


def _print(text: bytes) -> None:
    """Some of a submission's output."""
    if text:
        sys.stderr.write(without_controls(text.decode(errors="replace")))
        sys.stderr.flush()


_STYLE = re.compile(r"(\x1b\[[0-9;]*m)")  # colours and weights


def without_controls(text: str, styled: bool = False) -> str:
    """Text with control characters as escapes; colours stay where `styled`."""
    parts = _STYLE.split(text) if styled else [text]
    return "".join(
        part if number % 2 else quoted(part, len(part), lines=True)
        for number, part in enumerate(parts)
    )


def _check_progress(state: Any) -> None:
    """Refuse a record of progress that has another form than the stand-in's."""
    if not isinstance(state, dict) or set(state) != {"task", "done", "total"}:
        raise worker.WireError("progress of another form")
    if not all(type(state[key]) is int for key in ("done", "total")):
        raise worker.WireError("progress that is no number")
    _text(state["task"])


def _show_progress(state: dict[str, Any]) -> None:
    """A record of the stand-in, for whoever listens here."""
    state = {**state, "task": _text(state["task"])}
    logging.getLogger(console.PROGRESS_LOGGER).info("", extra={"progress": state})


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise worker.WireError("a message that is no text")
    return quoted(" ".join(value.split()))
