"""Judges an exercise as ``neuron_cpu check`` does, by the task of the package's copy."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..lessons import Lesson
from . import verdict
from .cases import Case, case
from .references import Reference
from .tables import word
from .verdict import Settings, Verdict

SETTINGS = Settings(mends=False)  # what is to be found out is not told


class Task(NamedTuple):
    """The task of an exercise.

    Attributes:
        text: the task, for people.
        kernel: the one that the exercise begins with.
        cases: arguments; the last one is timed.
        faster: how many times as fast as that kernel an answer has to be, None for any time.
    """

    text: str
    kernel: Any
    reference: Callable
    cases: tuple[Case, ...]
    faster: float | None


class Finding(NamedTuple):
    """The verdict on an answer.

    Attributes:
        verdicts: one a case.
        speedup: times as fast as the exercise's kernel on the last case; None where no time is
            asked for, or there is none.
        missing: why the lesson is not passed, empty where it is.
    """

    verdicts: list[Verdict]
    speedup: float | None
    missing: list[str]


def task(lesson: Lesson, language: str) -> Task:
    """The exercise as the package has it; the SDK's names have to be importable."""
    module = lesson.module(language)
    cases = tuple(map(case, module.CASES))
    kernel = getattr(module, lesson.name)
    text = lesson.track(language).task
    return Task(text, kernel, module.reference, cases, getattr(module, "FASTER", None))


def check(kernel: Any, asked: Task) -> Finding:
    """Judge a learner's kernel: legal, right, without warnings, and fast enough.

    Raises:
        Exception: what the kernel's Python body raises.
    """
    reference = Reference(asked.reference)
    verdicts = [verdict.judge(kernel, reference, one, SETTINGS) for one in asked.cases]
    missing = []
    failed = [word(one) for one in verdicts if not one.correct]
    if failed:
        words = " and ".join(sorted(set(failed)))
        missing.append(f"{words} in {len(failed)} of {len(verdicts)} cases")
    if any(one.warnings for one in verdicts):
        missing.append("warned of, and a lesson passes without warnings")
    speedup = _speedup(verdicts[-1], asked)
    if asked.faster is not None and speedup is not None and speedup < asked.faster:
        missing.append(f"{compared(speedup)}, {asked.faster:g} times asked for")
    return Finding(verdicts, speedup, missing)


def compared(speedup: float) -> str:
    """A ratio of estimates in words."""
    return f"{speedup:.2f} times as fast as the exercise's own kernel"


def _speedup(timed: Verdict, asked: Task) -> float | None:
    if asked.faster is None or timed.speed is None:
        return None
    program = verdict.traced(asked.kernel, asked.cases[-1], ())
    return verdict.speed(program, SETTINGS).time_ns / timed.speed.time_ns
