"""The search: points are traced, verified, estimated and run in processes; optuna proposes them."""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ..errors import UsageError
from ..judge.cases import Case
from ..judge.verdict import Settings
from ..processes import forked, limits
from .space import Point, Source, drawn, points, size

Figures = tuple[float, int]  # estimated ns of all cases, most SBUF bytes per partition of one


class Task(NamedTuple):
    """What every point is tried on.

    Attributes:
        source: the kernel.
        reference: FILE and function name that results are held against, None to skip that.
        library: what the reference computes with, None to find out.
        cases: arguments; the times of all of them add up.
        seconds: that one point may take.
    """

    source: Source
    reference: Optional[tuple[Path, str]]
    library: Optional[str]
    cases: tuple[Case, ...]
    settings: Settings
    seconds: float


@dataclass
class Trial:
    """What became of one point.

    Attributes:
        point: values by name.
        refusal: why it cannot be used: illegal, wrong, failing or too slow to try.
        kind: "legal", "illegal", "wrong" or "failed".
        time_ns, sbuf_bytes: of a legal point.
        checked: whether it ran and agreed with the reference.
    """

    point: Point
    kind: str = "legal"
    refusal: str = ""
    time_ns: float = 0.0
    sbuf_bytes: int = 0
    checked: bool = False

    @property
    def figures(self) -> Figures:
        return self.time_ns, self.sbuf_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def beaten(figures: Figures, others: Sequence[Figures]) -> bool:
    """Whether another is at least as good in both, and not the same."""
    return any(o != figures and o[0] <= figures[0] and o[1] <= figures[1] for o in others)


def front(trials: Sequence[Trial], with_reference: bool) -> list[Trial]:
    """Usable trials that no other beats, fastest first; of equal ones the first."""
    usable = [t for t in trials if t.kind == "legal" and (t.checked or not with_reference)]
    figures = [t.figures for t in usable]
    best: dict[Figures, Trial] = {}
    for trial in usable:
        if not beaten(trial.figures, figures):
            best.setdefault(trial.figures, trial)
    return sorted(best.values(), key=lambda trial: trial.figures)


# --- one point, in a process of its own -----------------------------------------------------------
def attempt(task: Task, point: Point, known: Sequence[Figures]) -> Trial:
    """Trace and time a point; run it only where none of the `known` ones beats it."""
    trial = Trial(point)
    try:
        with _seconds(task.seconds):
            _attempt(task, trial, known)
    except UsageError:
        raise
    except TimeoutError as error:
        trial.kind, trial.refusal = "failed", str(error)
    except (Exception, SystemExit) as error:
        trial.kind, trial.refusal = "failed", f"{type(error).__name__}: {error}"
    return trial


def _attempt(task: Task, trial: Trial, known: Sequence[Figures]) -> None:
    from ..core import Kernel, NkiError
    from ..judge import verdict

    found, keywords = task.source.at(trial.point)
    kernel = found if isinstance(found, Kernel) else Kernel(found)
    tuned = tuple(sorted(keywords.items()))
    # Objects of the file are of the classes that the point has loaded.
    cases = [
        Case(case.positional, case.named + tuned).resolved(task.source.objects())
        for case in task.cases
    ]
    for case in cases:
        try:
            program = verdict.traced(kernel, case, task.settings.grid)
        except NkiError as error:
            trial.kind, trial.refusal = "illegal", str(error)
            return
        speed = verdict.speed(program, task.settings)
        trial.time_ns += speed.time_ns
        trial.sbuf_bytes = max(trial.sbuf_bytes, speed.sbuf_bytes)
    if task.reference is None or beaten(trial.figures, known):
        return
    for case in cases:
        judged = verdict.judge(kernel, _reference(task, tuple(keywords)), case, task.settings)
        if not judged.correct:
            worst = judged.worst
            trial.kind = "wrong"
            trial.refusal = judged.mismatch or (
                f"largest error {worst.accuracy.largest:.3g}" if worst else judged.refusal
            )
            return
    trial.checked = True


def _reference(task: Task, tuned: tuple[str, ...]) -> Any:
    """The reference, which gets none of the tuned keyword arguments."""
    from ..judge.references import Reference, library_of

    assert task.reference is not None
    function = _function(*task.reference)

    @functools.wraps(function)
    def plain(*positional: Any, **named: Any) -> Any:
        return function(*positional, **{k: v for k, v in named.items() if k not in tuned})

    return Reference(plain, task.library or library_of(function))


@functools.cache
def _function(path: Path, name: str) -> Callable:
    from .space import _load

    # Under a name of its own: the kernel's file is loaded anew for every point.
    return getattr(_load(f"reference of {path.stem}", path, {}), name)


@contextlib.contextmanager
def _seconds(limit: float) -> Iterator[None]:
    """A time limit for Python code in a process's main thread."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took longer than {limit:g} s; --time-limit gives it more")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- all points -----------------------------------------------------------------------------------
class Search:
    """Points of a space, some at the same time.

    Args:
        most: points to try; a space of no more is tried whole.
        done: told of each trial.
        known: trials of an earlier search; they count, and are not tried again.
    """

    def __init__(
        self,
        task: Task,
        space: dict[str, list[Any]],
        most: int,
        jobs: int,
        seed: int,
        done: Callable[[Trial], object],
        known: Sequence[Trial] = (),
    ) -> None:
        self.task, self.space, self.most, self.jobs, self.done = task, space, most, jobs, done
        self.trials: list[Trial] = []
        self._tried: dict[tuple, Trial] = {}
        self._all = points(space) if size(space) <= most else None  # a small space is tried whole
        self._study = None if self._all is not None else _study(seed % 2**32)
        if self._all is None and self._study is None:
            self._all = drawn(space, seed)
        for trial in known:
            asked, point = None, trial.point
            if self._study is not None:
                self._study.enqueue_trial(self._indices(point))
                asked = self._study.ask()
                point = self._proposed(asked)
            self._note((asked, point), trial)

    def run(self) -> None:
        """Try points until there are enough; `trials` has those that are known when it ends."""
        context = forked.context("neuron_cpu.judge.verdict")
        wanted = min(self.most, size(self.space))
        pool = ProcessPoolExecutor(self.jobs, context, initializer=_ready)
        running: dict[Future[Trial], Any] = {}
        others = set(multiprocessing.active_children())
        try:
            while len(self.trials) < wanted:
                while len(running) < self.jobs and len(self.trials) + len(running) < wanted:
                    if not self._start(pool, running):
                        break
                if not running:
                    break  # nothing is proposed any more but what has been tried
                finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in finished:
                    self._finish(running.pop(future), future.result())
        except BrokenProcessPool as error:
            raise UsageError(
                "a process of the search was ended while it tried a point, for want of memory or "
                "by the kernel's own code, expected it to answer; try fewer --jobs."
            ) from error
        finally:
            # Workers first: one that is just starting would miss what the pool takes away.
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, pool: ProcessPoolExecutor, running: dict) -> bool:
        """Send off the next point that has not been tried; False where none comes up."""
        correct = [t.figures for t in self.trials if t.checked]
        if self._study is None:
            left = (p for p in self._all or () if tuple(p.values()) not in self._tried)
            for point in left:
                running[pool.submit(attempt, self.task, point, correct)] = (None, point)
                return True
            return False
        for _ in range(100):
            asked = self._study.ask()
            point = self._proposed(asked)
            key = tuple(point.values())
            known = self._tried.get(key)
            if known is None and all(key != tuple(t[1].values()) for t in running.values()):
                future = pool.submit(attempt, self.task, point, correct)
                running[future] = (asked, point)
                return True
            if known is not None:
                self._tell(asked, known)
            else:
                self._study.tell(asked, state=_failed())
        return False

    def _finish(self, started: tuple[Any, Point], trial: Trial) -> None:
        self._note(started, trial)
        self.done(trial)

    def _note(self, started: tuple[Any, Point], trial: Trial) -> None:
        asked, point = started
        self._tried[tuple(point.values())] = trial
        self._tell(asked, trial)
        self.trials.append(trial)

    def _tell(self, asked: Any, trial: Trial) -> None:
        if self._study is None:
            return
        if trial.kind == "legal":
            self._study.tell(asked, list(trial.figures))
        else:
            self._study.tell(asked, state=_failed())

    def _proposed(self, asked: Any) -> Point:
        """A point that the optimiser proposes: an index into the values of each name."""
        point = {}
        for name, values in self.space.items():
            if all(isinstance(v, (int, float)) for v in values):  # an order that means something
                at = asked.suggest_int(name, 0, len(values) - 1)
            else:
                at = asked.suggest_categorical(name, list(range(len(values))))
            point[name] = values[at]
        return point

    def _indices(self, point: Point) -> dict[str, int]:
        return {name: self.space[name].index(value) for name, value in point.items()}


def _study(seed: int) -> Any:
    try:
        import optuna
    except ImportError:
        print(
            "The space has more than --points points: they are drawn at random, as optuna is not "
            "installed (pip install optuna), which searches.",
            file=sys.stderr,
        )
        return None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed)
    return optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)


def _failed() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL


def _ready() -> None:
    """A worker: one thread, Ctrl-C is the parent's, nothing on the terminal."""
    import warnings

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limits.end_with_parent()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
