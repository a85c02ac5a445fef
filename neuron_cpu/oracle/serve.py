"""Requests in, answers out: lines of JSON on standard streams."""

import contextlib
import functools
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from io import BufferedIOBase, FileIO
from pathlib import Path
from typing import Any

from ..cluster import Cluster, threads
from ..errors import UsageError
from ..judge import cases, recorder
from ..sandbox import forked, neighbours
from ..sandbox.forked import Talk
from . import forms, judge
from .forms import Answer, Request

MOST_WAITING = 1000  # requests that were read and not answered; the reader waits beyond
MOST_JOBS = 2000  # of one judge's process, which then gives back what it has gathered
LONGEST_ANSWER = 1 << 26
GRACE_SECONDS = 5.0  # for a judge beyond the candidate's own time
TOLD = "outcome", "sentence", "identifier", "line", "fault", "mending", "digest"


class Oracle:
    """Candidates in processes of their own, judged by a few that stay; `close` ends all of them.

    Args:
        option: what gives a candidate more time, in messages.
        cluster: whose workers have these processes instead.
    """

    def __init__(
        self,
        jobs: int,
        memory_gib: float = 4.0,
        option: str = "limits",
        cluster: Cluster | None = None,
    ) -> None:
        self.memory_gib, self._option, self._cluster = memory_gib, option, cluster
        self._seed = secrets.randbelow(1 << 32)  # which no candidate sees
        self._pool = ThreadPoolExecutor(jobs)
        self._idle: queue.LifoQueue[_Judge | None] = queue.LifoQueue()  # the warm one first
        for _ in range(jobs):
            self._idle.put(None)  # made when it is needed
        self.processes = forked.Processes(forked.context(judge.__name__))

    def submit(self, request: Request, done: Callable[[Answer], object]) -> None:
        """Give `done` the answer, from another thread, when it is known."""
        self._pool.submit(lambda: done(self.one(request)))

    def one(self, request: Request) -> Answer:
        """The answer to one request."""
        try:
            return self._one(request)
        except (ValueError, UsageError) as error:
            return forms.answer(request.id, "invalid", str(error))
        except Exception as error:  # a defect of the oracle costs this request alone
            said = f"the oracle failed ({type(error).__name__}: {error})"[:500]
            return forms.answer(request.id, "failed", said)

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()  # what waits for an answer ends
        self.processes.close()
        self._pool.shutdown(cancel_futures=True)

    def _one(self, request: Request) -> Answer:
        if request.seeds is None:
            request = request.model_copy(update={"seeds": [self._seed]})
        text = request.kernel.text()
        if text.endswith(".py"):
            raise ValueError(f"kernel.source is a path, expected a text; write file: {text!r}")
        reference = None if request.reference is None else request.reference.text()
        if request.limits.memory_gib > self.memory_gib:
            raise ValueError(f"limits.memory_gib: expected at most {self.memory_gib:g}")
        for case in request.cases:
            cases.case(case)
        started = time.monotonic()
        judged = self.judged if self._cluster is None else self._judged_elsewhere
        found = forms.answer(request.id, **judged(request, text, reference))
        found["seconds"] = round(time.monotonic() - started, 4)
        return found

    def _judged_elsewhere(self, request: Request, text: str, reference: str | None) -> Answer:
        """`judged` by an oracle of the cluster, which gets what the files import beside them."""
        assert self._cluster is not None
        asked, files = request.model_dump(by_alias=True), set[Path]()
        for code in (asked["kernel"], asked["reference"] or {}):
            if code.get("file") is not None:
                path = Path(code["file"]).resolve()
                code["file"] = str(path)
                files.update(neighbours.files(path)[1:])
        given = {"text": text, "reference": reference, "settings": [self.memory_gib, self._option]}
        return self._cluster.call(on_worker, sorted(files), request=asked, **given)

    # --- processes --------------------------------------------------------------------------------
    def judged(self, request: Request, text: str, reference: str | None) -> Answer:
        """Outcome and cases: of the first that is not passed, else of the last."""
        deadline = time.monotonic() + request.limits.seconds
        candidate = Talk(self.processes, recorder.record, request.recording(text))
        found: list[Answer] = []
        try:
            for case in request.cases:
                try:
                    recorded = candidate.receive(recorder.MOST_PROGRAM, deadline)
                except (EOFError, OSError, ValueError) as error:
                    return self._ended(error, candidate, request)
                one = self._ask(request, case, reference, bytes(recorded), deadline)
                found.append({"case": case, **one})
                if one["outcome"] != "passed":
                    break
        finally:
            candidate.end()
        shown = {name: found[-1][name] for name in TOLD if name in found[-1]}
        return {**shown, "cached": all(one.get("cached", False) for one in found), "cases": found}

    def _ask(
        self, request: Request, case: str, reference: str | None, recorded: bytes, until: float
    ) -> Answer:
        """A judge's answer; a judge that does not answer is ended and replaced."""
        chosen = self._idle.get()
        kept: _Judge | None = None
        try:
            if chosen is None:
                chosen = _Judge(self)
            asked = request.model_dump(by_alias=True)
            asked["kernel"] = {"name": request.kernel.name, "source": ""}
            line = json.dumps({"request": asked, "case": case, "reference": reference}).encode()
            try:
                answer = chosen.ask(line, recorded, until + GRACE_SECONDS)
            except (EOFError, OSError, ValueError) as error:
                return self._ended(error, chosen.talk, request, "while it was judged, ")
            kept = chosen if chosen.jobs < MOST_JOBS else None
            return answer
        finally:
            if chosen is not None and kept is None:
                chosen.talk.end()
            self._idle.put(kept)

    def _ended(self, error: Exception, talk: Talk, request: Request, when: str = "") -> Answer:
        """The answer where a process ends before its time."""
        said = forked.why(error, talk, request.limits.limits(), self._option)
        return {"outcome": "failed", "sentence": when + said}


def on_worker(
    folder: str, request: Answer, text: str, reference: str | None, settings: list[Any]
) -> Answer:
    """`Oracle.judged` on a worker of a cluster, by an oracle that stays there."""
    for code in (request["kernel"], request["reference"] or {}):
        if code.get("file") is not None:
            code["file"] = folder + code["file"]
    return _of_worker(*settings).judged(Request.model_validate(request), text, reference)


@functools.cache
def _of_worker(memory_gib: float, option: str) -> Oracle:
    return Oracle(threads(), memory_gib, option)


class _Judge:
    """A process that judges what candidates have recorded."""

    def __init__(self, oracle: Oracle) -> None:
        self.jobs, memory = 0, int(oracle.memory_gib * 2**30)
        self.talk = Talk(oracle.processes, judge.serve, memory, hears=True)

    def ask(self, line: bytes, recorded: bytes, deadline: float) -> Answer:
        self.jobs += 1
        self.talk.send(line, deadline)
        self.talk.send(recorded, deadline)
        return json.loads(self.talk.receive(LONGEST_ANSWER, deadline))


# --- lines ----------------------------------------------------------------------------------------
def converse(oracle: Oracle, lines: Iterable[bytes], write: Callable[[bytes], object]) -> None:
    """Answer every line; returns when all answers are written."""
    turn, room = threading.Lock(), threading.Semaphore(MOST_WAITING)

    def done(answer: Answer) -> None:
        try:
            with turn, contextlib.suppress(OSError, ValueError):  # nobody reads any more
                write(json.dumps(answer).encode() + b"\n")
        finally:
            room.release()

    for line in lines:
        for request in forms.requests(line) if line.strip() else ():
            room.acquire()
            if isinstance(request, Request):
                oracle.submit(request, done)
            else:
                done(request)
    for _ in range(MOST_WAITING):  # all are answered when all room is free
        room.acquire()


def bounded_lines(stream: BufferedIOBase) -> Iterable[bytes]:
    """Lines of a stream; one that is too long is cut, and its rest is passed over."""
    while line := stream.readline(forms.LONGEST + 2):
        if len(line) > forms.LONGEST and not line.endswith(b"\n"):
            while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
        yield line


def standard_streams(oracle: Oracle) -> None:
    """Serve standard input until it ends; nothing else may write to standard output."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    with os.fdopen(0, "rb", closefd=False) as lines:
        converse(oracle, bounded_lines(lines), lambda data: _write_all(out, data))


def _write_all(out: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[out.write(left) :]
