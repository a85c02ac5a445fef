"""Answers to the suite, each judged with its file in a process of its own, under limits."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch

from .. import suite
from ..core import Program
from ..core.device import dtypes
from ..judge import accuracy, verdict
from ..judge.references import Reference
from ..judge.verdict import Settings, Speed, Verdict
from ..processes import forked
from ..processes.limits import Limits
from ..processes.pipes import Pipe
from . import child

LEAST_SHARE = 0.5  # of the bytes that the suite's kernel needs: a mask may hide half of them
MISSING, FAILED = "missing", "failed"
LONGEST = 2**20  # bytes of a message that is no tensor
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError)  # of another form


@dataclass
class Outcome:
    """What became of one operator of the suite.

    Attributes:
        operator, level: which one.
        failure: why there is no verdict, empty where there is.
        missing: whether there is no file.
        verdicts: one a case; places are not looked for (`neuron_cpu check` does).
        naive_ns: estimate of the suite's own kernel on the last case.
        least_ns: what its arguments and results alone take of HBM's time; no answer is faster.
    """

    operator: str
    level: int
    naive_ns: float
    failure: str = ""
    missing: bool = False
    verdicts: list[Verdict] = field(default_factory=list)
    least_ns: float = 0.0

    @property
    def word(self) -> str:
        if self.missing:
            return MISSING
        if self.failure:
            return FAILED
        if not all(v.legal for v in self.verdicts):
            return "illegal"
        return "correct" if self.correct else "wrong"

    @property
    def correct(self) -> bool:
        answered = bool(self.verdicts) and not self.failure
        return answered and all(v.correct for v in self.verdicts)

    @property
    def speed(self) -> Optional[Speed]:
        """Of the last case, which is the timed one."""
        return self.verdicts[-1].speed if self.verdicts else None

    @property
    def speedup(self) -> float:
        """How many times as fast as the naive kernel; 0 where the answer is not right."""
        if not self.correct or self.speed is None:
            return 0.0
        return self.naive_ns / self.speed.time_ns

    def to_json(self) -> dict[str, Any]:
        return {
            "operator": self.operator,
            "level": self.level,
            "outcome": self.word,
            "failure": self.failure,
            "naive_time_ns": self.naive_ns,
            "speedup": self.speedup,
            "cases": [one.to_json() for one in self.verdicts],
        }


class Judging:
    """Answers in a folder, some at the same time; `close` ends every process of theirs."""

    def __init__(self, folder: Path, settings: Settings, bounds: Limits, jobs: int) -> None:
        self.folder, self.settings, self.bounds = folder.resolve(), settings, bounds
        self._context = forked.context(child.__name__)
        self._pool = ThreadPoolExecutor(jobs)
        self._running: set[Any] = set()
        self._turn = threading.Lock()
        self._closed = False

    def judge(self, names: Sequence[str], done: Callable[[Outcome], object]) -> list[Outcome]:
        """The outcomes, in the order of `names`; `done` is told of each when it is known."""
        futures: list[Future[Outcome]] = [self._pool.submit(self.one, name) for name in names]
        left = set(futures)
        while left:
            # In short waits: a thread that waits for a lock takes no Ctrl-C on some systems.
            finished, left = wait(left, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in finished:
                done(future.result())
        return [future.result() for future in futures]

    def close(self) -> None:
        with self._turn:
            self._closed = True
            running = list(self._running)
        for process in running:
            forked.end(process)
        self._pool.shutdown(cancel_futures=True)

    def one(self, name: str) -> Outcome:
        """Judge one operator."""
        operator = suite.operator(name)
        naive = [verdict.traced(operator.kernel, c, self.settings.grid) for c in operator.cases]
        timed = verdict.speed(naive[-1], self.settings)
        outcome = Outcome(name, operator.level, timed.time_ns)
        outcome.least_ns = LEAST_SHARE * timed.memory_ns
        path = self.folder / f"{name}.py"
        if not path.is_file():
            outcome.missing = True
            return outcome
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=child.serve,
            args=(theirs, path, operator.cases, self.settings, self.bounds),
            daemon=True,
        )
        with self._turn:
            if self._closed:
                return outcome
            forked.start(process)
            self._running.add(process)
        theirs.close()
        try:
            line = _Line(Pipe(ours, process.sentinel), time.monotonic() + self.bounds.wall_seconds)
            self._listen(outcome, line, operator, naive)
        except (EOFError, OSError, *MALFORMED) as error:
            outcome.failure = _why(error, process, self.bounds)
        finally:
            forked.end(process)
            with self._turn:
                self._running.discard(process)
            ours.close()
        return outcome

    def _listen(
        self, outcome: Outcome, line: _Line, operator: suite.Operator, naive: list[Program]
    ) -> None:
        """Take the child's messages and measure its results.

        Raises:
            EOFError, OSError: it ended too early, or took too long.
            ValueError: what it sent is not what it should be.
        """
        reference = Reference(operator.reference)
        for case, program in zip(operator.cases, naive):
            content = line.message()
            if "failure" in content:
                outcome.failure = str(content["failure"])
                return
            found = Verdict(str(case), refusal=str(content.get("refusal", "")))
            outcome.verdicts.append(found)
            if found.refusal:
                continue
            found.speed = _checked_speed(content["speed"])
            if case is operator.cases[-1] and found.speed.time_ns < outcome.least_ns:
                raise ValueError(
                    f"an estimate of {found.speed.time_ns:.3g} ns, expected at least "
                    f"{outcome.least_ns:.3g}, which its arguments and results alone take"
                )
            found.mismatch = _other_results(content, program)
            types = [dtypes.host_dtype(s.dtype) for s in program.outputs]
            tolerance = accuracy.default_tolerance(verdict.types_of(program))
            for kind, seed in self.settings.trials():
                if found.mismatch:
                    return  # what follows cannot be read
                got = [
                    line.tensor(dtype, shape) for dtype, shape in zip(types, program.output_shapes)
                ]
                arguments = case.values(kind, seed)
                exact, plain = reference.exact(*arguments), reference.plain(*arguments)
                answers = verdict.measured(
                    types, got, reference, exact, plain, tolerance, self.settings.nan
                )
                for number, result in enumerate(answers):
                    found.results.append(verdict.Result(number, kind, seed, *result))


# --- the line to the child ------------------------------------------------------------------------
class _Line:
    """What comes from a child, until a point in time.

    Raises:
        EOFError, OSError: it ended too early, or took too long.
        ValueError: what it sent is not what it should be.
    """

    def __init__(self, pipe: Pipe, deadline: float) -> None:
        self._pipe, self._deadline = pipe, deadline

    def message(self) -> dict[str, Any]:
        try:
            content = json.loads(self._pipe.receive(LONGEST, self._deadline))
        except RecursionError as error:
            raise ValueError("an answer of too many levels") from error
        if not isinstance(content, dict):
            raise ValueError("an answer that is no object")
        return content

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        raw = self._pipe.receive(size, self._deadline)
        if len(raw) != size:
            raise ValueError(f"a result of {len(raw)} bytes, expected {size}")
        return torch.frombuffer(raw, dtype=dtype).reshape(shape).to(torch.float64)


def _checked_speed(content: Any) -> Speed:
    try:
        low, high = map(float, content["band_ns"])
        speed = Speed(
            time_ns=float(content["time_ns"]),
            band_ns=(low, high),
            bound=str(content["bound"]),
            binding=str(content["binding"]),
            roofline_percent=float(content["roofline_percent"]),
            roofline_side=str(content["roofline_side"]),
            macs=int(content["macs"]),
            sbuf_bytes=int(content["sbuf_bytes"]),
            dma_profile=str(content["dma_profile"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no estimate ({error})") from error
    if not (math.isfinite(speed.time_ns) and speed.time_ns > 0):
        raise ValueError(f"an estimate of {speed.time_ns} ns")
    return speed


def _other_results(content: dict[str, Any], program: Program) -> str:
    """What of the results has another number, shape or type than the task asks for."""
    asked = [
        (str(dtypes.host_dtype(s.dtype)).removeprefix("torch."), list(shape))
        for s, shape in zip(program.outputs, program.output_shapes)
    ]
    got = list(zip(content.get("types", ()), content.get("shapes", ())))
    if got == asked:
        return ""
    return f"the kernel returns {_shapes(got)}, expected {_shapes(asked)}; return those"


def _shapes(results: Sequence[tuple[Any, Any]]) -> str:
    return ", ".join(f"{dtype} {shape}" for dtype, shape in results) or "nothing"


def _why(error: Exception, process: Any, bounds: Limits) -> str:
    """Why a child's answer ends before its time."""
    if isinstance(error, TimeoutError):
        return f"it took longer than {bounds.wall_seconds:.0f} s; --time-limit gives it more"
    if isinstance(error, MALFORMED):
        told = f"{type(error).__name__}: {error}"[:200]
        return f"its process sent something else than results ({told})"
    process.join(5)
    code = process.exitcode
    if code is not None and code < 0:
        name = forked.signal_name(-code)
        if name == "SIGXCPU":
            return f"it used the {bounds.cpu_seconds} s of processor time that it may use"
        return f"its process was ended by {name}"
    return f"its process ended with status {code} before it had answered"
