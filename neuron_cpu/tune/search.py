"""The search: the oracle judges points, some at the same time; optuna proposes them."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import UsageError
from ..oracle.forms import Code, Request
from ..oracle.serve import Oracle
from .space import Point, Source, points, size

Figures = tuple[float, int]  # estimated ns of all cases, most SBUF bytes per partition of one
MEMORY = 64.0  # GiB of address space that a point may use
AHEAD = 2  # points begun for each process, so that a slow one holds up no other
KINDS = {"refused": "refused", "wrong": "wrong", "failed": "failed"}  # by the oracle's outcome


@dataclass
class Trial:
    """The outcome of one point.

    Attributes:
        point: values by name.
        refusal: why it cannot be used: refused, wrong, failing or too slow to try.
        kind: "legal", "refused", "wrong" or "failed".
        time_ns, sbuf_bytes: of a legal point.
        checked: whether it ran and agreed with the reference.
        answer: the oracle's last answer.
    """

    point: Point
    kind: str = "legal"
    refusal: str = ""
    time_ns: float = 0.0
    sbuf_bytes: int = 0
    checked: bool = False
    answer: dict[str, Any] = field(default_factory=dict)

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


def attempt(oracle: Oracle, request: Request, point: Point, known: Sequence[Figures]) -> Trial:
    """Estimate a point; run it only where none of the `known` ones beats it.

    Raises:
        UsageError: the request cannot be met, such as one with a reference that fails.
    """
    trial = Trial(point)
    _judge(oracle, request.model_copy(update={"reference": None}), trial)
    for case in trial.answer["cases"] if trial.kind == "legal" else ():
        trial.time_ns += 1e3 * case["estimate"]["time_us"]
        trial.sbuf_bytes = max(trial.sbuf_bytes, case["estimate"]["sbuf_bytes"])
    if request.reference and trial.kind == "legal" and not beaten(trial.figures, known):
        _judge(oracle, request, trial)
        trial.checked = trial.kind == "legal"
    return trial


def _judge(oracle: Oracle, request: Request, trial: Trial) -> None:
    trial.answer = oracle.one(request)
    if trial.answer["outcome"] == "invalid":
        raise UsageError(trial.answer["sentence"])
    trial.kind = KINDS.get(trial.answer["outcome"], "legal")
    trial.refusal = trial.answer["sentence"].partition("; places says")[0]  # --json has them


# --- all points -----------------------------------------------------------------------------------
class Search:
    """Points of a space, some at the same time.

    Args:
        oracle: judges them; it is closed at the end.
        request: of the kernel as it is.
        most: points to try; a space of no more is tried whole.
        done: told of each trial.
    """

    def __init__(
        self,
        oracle: Oracle,
        request: Request,
        source: Source,
        space: dict[str, list[Any]],
        most: int,
        jobs: int,
        seed: int,
        done: Callable[[Trial], object],
    ) -> None:
        self.oracle, self.space, self.done = oracle, space, done
        self.request, self.source = request, source
        self.most, self.jobs = most, jobs
        self.trials: list[Trial] = []
        self._tried: dict[tuple, Trial] = {}
        self._all = points(space) if size(space) <= most else None  # a small space is tried whole
        self._study = None if self._all is not None else _study(seed % 2**32)

    def run(self) -> None:
        """Try points until there are enough; `trials` has the known ones when it ends."""
        wanted = min(self.most, size(self.space))
        pool = ThreadPoolExecutor(self.jobs)
        # Ended in the order in which they began: what a point is told of others, and what the
        # optimiser proposes, does not depend on how fast which process is.
        running: deque[tuple[Future[Trial], Any, Point]] = deque()
        try:
            while len(self.trials) < wanted:
                while len(running) < min(AHEAD * self.jobs, wanted - len(self.trials)):
                    if not self._start(pool, running):
                        break
                if not running:
                    break  # nothing is proposed any more but what has been tried
                if wait([running[0][0]], timeout=0.5).done:  # short waits, for Ctrl-C
                    future, asked, point = running.popleft()
                    self._finish((asked, point), future.result())
        finally:
            self.oracle.close()  # what still runs fails at once
            pool.shutdown(cancel_futures=True)

    def _start(self, pool: ThreadPoolExecutor, running: deque) -> bool:
        """Send off the next point that has not been tried; False where none comes up."""
        if self._study is None:
            for point in (p for p in self._all or () if tuple(p.values()) not in self._tried):
                running.append((self._submitted(pool, point), None, point))
                return True
            return False
        for _ in range(100):
            asked = self._study.ask()
            point = self._proposed(asked)
            key = tuple(point.values())
            known = self._tried.get(key)
            if known is None and all(key != tuple(other.values()) for *_, other in running):
                running.append((self._submitted(pool, point), asked, point))
                return True
            if known is not None:
                self._tell(asked, known)
            else:
                self._study.tell(asked, state=_failed())
        return False

    def _submitted(self, pool: ThreadPoolExecutor, point: Point) -> Future[Trial]:
        correct = [t.figures for t in self.trials if t.checked]
        request = self.request.model_copy(update={"kernel": Code(**self.source.at(point))})
        return pool.submit(attempt, self.oracle, request, point, correct)

    def _finish(self, started: tuple[Any, Point], trial: Trial) -> None:
        asked, point = started
        self._tried[tuple(point.values())] = trial
        self._tell(asked, trial)
        self.trials.append(trial)
        self.done(trial)

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


def _study(seed: int) -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UsageError(
            "the space has more than --points points, expected optuna, which searches it; pip "
            "install optuna, or raise --points."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed)
    return optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)


def _failed() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL
