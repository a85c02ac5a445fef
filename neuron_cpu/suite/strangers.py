"""Answers to the suite: the oracle judges each, with its file in a process of its own."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import suite
from ..cluster import Cluster
from ..core import Program
from ..judge import verdict
from ..oracle.forms import Answer, Bounds, Code, Request
from ..oracle.judge import results_of
from ..oracle.serve import Oracle

LEAST_SHARE = 0.5  # of the bytes and products of the suite's kernel: a mask may hide half of them
CORRECT, WRONG, REFUSED, FAILED, MISSING = "correct", "wrong", "refused", "failed", "missing"
WORDS = {"passed": CORRECT, "wrong": WRONG, "refused": REFUSED}  # for the oracle's; FAILED for more
KERNEL = "kernel"  # what an answer's function is called


@dataclass
class Outcome:
    """The outcome of one operator.

    Attributes:
        operator, level: its name and level.
        naive_ns: estimate of the suite's own kernel on the last case.
        word: CORRECT, WRONG, REFUSED, FAILED or MISSING, and `sentence` says why.
        cases: the oracle's answers, up to the first case that does not pass; the last is timed.
    """

    operator: str
    level: int
    naive_ns: float
    word: str = MISSING
    sentence: str = ""
    cases: list[Answer] = field(default_factory=list)

    @property
    def correct(self) -> bool:
        return self.word == CORRECT

    @property
    def estimate(self) -> Answer | None:
        """The estimate of the timed case; None where the answer is not right."""
        return self.cases[-1]["estimate"] if self.correct else None

    @property
    def speedup(self) -> float:
        """How many times as fast as the naive kernel; 0 where the answer is not right."""
        return self.naive_ns / (1e3 * self.estimate["time_us"]) if self.estimate else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "operator": self.operator,
            "level": self.level,
            "outcome": self.word,
            "sentence": self.sentence,
            "naive_time_ns": self.naive_ns,
            "speedup": self.speedup,
            "cases": self.cases,
        }


class Judging:
    """Answers in a folder, some at the same time; `close` ends every process of theirs.

    Args:
        cluster: whose workers judge them.
    """

    def __init__(
        self,
        folder: Path,
        seeds: Sequence[int],
        bounds: Bounds,
        jobs: int,
        cluster: Cluster | None = None,
    ) -> None:
        self.folder, self.seeds, self.bounds = folder.resolve(), list(seeds), bounds
        self._pool = ThreadPoolExecutor(jobs)
        self.oracle = Oracle(jobs, bounds.memory_gib, "--time-limit", cluster)

    def judge(self, names: Sequence[str], done: Callable[[Outcome], object]) -> list[Outcome]:
        """The outcomes, in the order of `names`; `done` is told of each when it is known."""
        futures = [self._pool.submit(self.one, name) for name in names]
        for future in as_completed(futures):
            done(future.result())
        return [future.result() for future in futures]

    def close(self) -> None:
        self.oracle.close()  # what waits for an answer ends
        self._pool.shutdown(cancel_futures=True)

    def one(self, name: str) -> Outcome:
        """Judge one operator."""
        operator = suite.operator(name)
        odd, timed_case = operator.cases
        cases = (odd, *suite.drawn(name, self.seeds[0]), timed_case)
        naive = [verdict.traced(operator.kernel, case, ()) for case in cases]
        timed = verdict.speed(naive[-1], verdict.Settings())
        outcome, path = Outcome(name, operator.level, timed.time_ns), self.folder / f"{name}.py"
        if not path.is_file():
            return outcome
        request = Request(
            schema=1,
            kernel=Code(name=KERNEL, file=str(path)),
            reference=Code(name="reference", source=suite.template(name)),
            cases=[shlex.join(case.words) for case in cases],
            values=list(operator.values),
            seeds=self.seeds,
            target=naive[-1].core.name,
            limits=self.bounds,
        )
        found = self.oracle.one(request)
        outcome.word = WORDS.get(found["outcome"], FAILED)
        outcome.sentence, outcome.cases = found["sentence"], found.get("cases", [])
        others = filter(None, map(_other_results, outcome.cases, naive))
        if outcome.correct and (said := next(others, "")):
            outcome.word, outcome.sentence = WRONG, said
        least = LEAST_SHARE * timed.time_ns * timed.roofline_percent / 100
        if outcome.estimate and 1e3 * outcome.estimate["time_us"] < least:
            outcome.word, outcome.sentence = (
                FAILED,
                (
                    f"an estimate of {outcome.estimate['time_us']:.3g} µs, expected at least "
                    f"{least / 1e3:.3g}, which half of the task's data and products take"
                ),
            )
        return outcome


def _other_results(found: Answer, program: Program) -> str:
    """Results with another number, shape or type than the task's, in words."""
    asked = results_of(program)
    if found["results"] == asked:
        return ""
    got, expected = (
        ", ".join(f"{dtype} {shape}" for dtype, shape in some) for some in (found["results"], asked)
    )
    return f"the kernel returns {got or 'nothing'}, expected {expected}; return those"
