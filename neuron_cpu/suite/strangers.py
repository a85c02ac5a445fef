"""Answers to the suite, each judged with its file in a process of its own, under limits."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

import torch

from .. import suite
from ..cluster import Cluster, WorkersLostError
from ..core import Program
from ..core.device import dtypes
from ..judge import accuracy, recorder, verdict
from ..judge.cases import Case
from ..judge.recorder import Recording
from ..judge.references import Reference
from ..judge.verdict import Settings, Speed, Verdict
from ..sandbox import forked, neighbours
from ..sandbox.forked import MALFORMED, Talk
from ..sandbox.limits import Limits
from . import child

LEAST_SHARE = 0.5  # of the bytes and products of the suite's kernel: a mask may hide half of them
MISSING, FAILED = "missing", "failed"
KERNEL = "kernel"  # what an answer's function is called
LONGEST = 2**20  # bytes of a message that is no tensor


@dataclass(frozen=True)
class Candidate:
    """A stranger's kernel, and how it is judged.

    Attributes:
        path, function: where it stands.
        cases: its arguments; the last is the timed one.
        settings: of its verdicts.
        reference: what its results are held against.
        like: programs that return what is asked for, one a case; none: what the reference returns.
        least_ns: an estimate below it is refused.
    """

    path: Path
    function: str
    cases: Sequence[Case]
    settings: Settings
    reference: Reference
    like: Sequence[Program] = ()
    least_ns: float = 0.0


@dataclass
class Judged:
    """The outcome of one candidate.

    Attributes:
        failure: why there is no verdict, empty where there is.
        verdicts: one a case; places are not looked for (`neuron_cpu check` does).
    """

    failure: str = ""
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def correct(self) -> bool:
        answered = bool(self.verdicts) and not self.failure
        return answered and all(v.correct for v in self.verdicts)

    @property
    def speed(self) -> Optional[Speed]:
        """The speed in the last case, which is timed."""
        return self.verdicts[-1].speed if self.verdicts else None


@dataclass(kw_only=True)
class Outcome(Judged):
    """The outcome of one operator of the suite.

    Attributes: operator, level: its name and level.
        missing: whether there is no file.
        naive_ns: estimate of the suite's own kernel on the last case.
    """

    operator: str
    level: int
    naive_ns: float
    missing: bool = False

    @property
    def word(self) -> str:
        if self.missing:
            return MISSING
        if self.failure:
            return FAILED
        if not all(v.legal for v in self.verdicts):
            return "refused"
        return "correct" if self.correct else "wrong"

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
    """Answers in a folder, some at the same time; `close` ends every process of theirs.

    Args:
        cluster: whose workers judge them.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        bounds: Limits,
        jobs: int,
        cluster: Optional[Cluster] = None,
    ) -> None:
        self.folder, self.settings, self.bounds = folder.resolve(), settings, bounds
        self._cluster = cluster
        self._pool = ThreadPoolExecutor(jobs)
        self._processes = forked.Processes(forked.context(child.__name__))

    def judge(self, names: Sequence[str], done: Callable[[Outcome], object]) -> list[Outcome]:
        """The outcomes, in the order of `names`; `done` is told of each when it is known."""
        one = self.one if self._cluster is None else self._elsewhere
        futures: list[Future[Outcome]] = [self._pool.submit(one, name) for name in names]
        left = set(futures)
        while left:
            # In short waits: a thread that waits for a lock takes no Ctrl-C on some systems.
            finished, left = wait(left, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in finished:
                done(future.result())
        return [future.result() for future in futures]

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()  # what waits for an outcome ends
        self._processes.close()
        self._pool.shutdown(cancel_futures=True)

    def _elsewhere(self, name: str) -> Outcome:
        """`one` on a worker of the cluster."""
        assert self._cluster is not None
        path = self.folder / f"{name}.py"
        files = neighbours.files(path) if path.is_file() else []
        bounds, seeds = dataclasses.astuple(self.bounds), self.settings.seeds
        asked = {"name": name, "place": str(self.folder), "seeds": seeds, "bounds": bounds}
        try:
            return self._cluster.call(on_worker, files, **asked)
        except WorkersLostError as error:
            level = suite.names()[name]
            return Outcome(operator=name, level=level, naive_ns=0.0, failure=str(error))

    def one(self, name: str) -> Outcome:
        """Judge one operator."""
        operator = suite.operator(name)
        settings = replace(self.settings, kinds=operator.values)
        odd, timed_case = operator.cases
        cases = (odd, *suite.drawn(name, settings.seeds[0]), timed_case)
        naive = [verdict.traced(operator.kernel, c, settings.grid) for c in cases]
        timed = verdict.speed(naive[-1], settings)
        path = self.folder / f"{name}.py"
        outcome = Outcome(operator=name, level=operator.level, naive_ns=timed.time_ns)
        if not path.is_file():
            outcome.missing = True
            return outcome
        least = LEAST_SHARE * timed.time_ns * timed.roofline_percent / 100
        reference = Reference(operator.reference)
        self.of(Candidate(path, KERNEL, cases, settings, reference, naive, least), outcome)
        return outcome

    def of(self, candidate: Candidate, judged: Judged) -> None:
        """Judge any candidate, into `judged`."""
        recording = Recording(
            candidate.path,
            candidate.function,
            [case.public for case in candidate.cases],
            candidate.settings.grid,
            self.bounds,
        )
        core = candidate.like[-1].core.name if candidate.like else None
        given = candidate.cases, candidate.settings, self.bounds, core, candidate.least_ns
        answer = Talk(self._processes, recorder.record, recording)
        judge = Talk(self._processes, child.serve, *given, hears=True)
        deadline = time.monotonic() + self.bounds.wall_seconds
        try:
            line = _Line(judge, deadline)
            for number, case in enumerate(candidate.cases):
                judge.send(answer.receive(recorder.MOST_PROGRAM, deadline), deadline)
                if not _listen(judged, line, candidate, number, case):
                    break
        except (EOFError, OSError, *MALFORMED) as error:
            judged.failure = forked.why(error, (answer, judge), self.bounds, "--time-limit")
        finally:
            answer.end()
            judge.end()


def on_worker(
    folder: str, name: str, place: str, seeds: Sequence[int], bounds: Sequence[float]
) -> Outcome:
    """`Judging.one` on a worker of a cluster."""
    settings = Settings(seeds=tuple(seeds))
    judging = Judging(Path(folder + place), settings, Limits(*bounds), 1)  # type: ignore[arg-type]
    try:
        return judging.one(name)
    finally:
        judging.close()


def _listen(judged: Judged, line: _Line, candidate: Candidate, number: int, case: Case) -> bool:
    """Take the messages about one case and measure its results; whether another one may follow.

    Raises:
        EOFError, OSError: it ended too early, or took too long.
        ValueError: what it sent is not what it should be.
    """
    content, settings = line.message(), candidate.settings
    found = Verdict(str(case))
    judged.verdicts += [] if "failure" in content else [found]
    if _is_refused(judged, found, content):
        return not judged.failure
    found.speed = Speed(**content["speed"])
    types = [torch.empty(0, dtype=getattr(torch, name)).dtype for name in content["types"]]
    shapes = [tuple(map(int, shape)) for shape in content["shapes"]]
    asked = [*(tensor.dtype for tensor in verdict.tensors_of(*case.meta())), *types]
    if candidate.like:
        found.mismatch = _other_results(content, candidate.like[number])
        asked = verdict.types_of(candidate.like[number])
    tolerance = settings.tolerance or accuracy.default_tolerance(asked)
    for kind, seed in settings.trials():
        if found.mismatch:
            return False  # what follows cannot be read
        if _is_refused(judged, found, line.message()):
            return not judged.failure
        got = [line.tensor(dtype, shape) for dtype, shape in zip(types, shapes)]
        arguments, trial = case.values(kind, seed), (kind, seed)
        verdict.hold(
            found, candidate.reference, arguments, types, got, tolerance, settings.nan, trial
        )
    return not found.mismatch


def _is_refused(judged: Judged, found: Verdict, content: dict[str, Any]) -> bool:
    """Whether a message says that a case, or the whole answer, has failed."""
    judged.failure = str(content.get("failure", ""))
    found.refusal = str(content.get("refusal", ""))
    if found.refusal:
        found.speed = None
    return bool(judged.failure or found.refusal)


# --- the line to the child ------------------------------------------------------------------------
class _Line:
    """A line from a child, until a point in time.

    Raises:
        EOFError, OSError: it ended too early, or took too long.
        ValueError: what it sent is not what it should be.
    """

    def __init__(self, talk: Talk, deadline: float) -> None:
        self._talk, self._deadline = talk, deadline

    def message(self) -> dict[str, Any]:
        return json.loads(self._talk.receive(LONGEST, self._deadline))

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        raw = self._talk.receive(size, self._deadline)
        if len(raw) != size:
            raise ValueError(f"a result of {len(raw)} bytes, expected {size}")
        return torch.frombuffer(raw, dtype=dtype).reshape(shape).to(torch.float64)


def _other_results(content: dict[str, Any], program: Program) -> str:
    """Results with another number, shape or type than the task's, in words."""
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
