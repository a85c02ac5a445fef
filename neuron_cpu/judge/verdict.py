"""The judgement of one kernel: legal, correct, how fast; and where it goes wrong."""

import contextlib
import inspect
import math
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core import Kernel, NkiError, Program
from ..core.current.kernel import Kernel as CurrentKernel
from ..core.device import dtypes, refusals
from ..core.device.errors import NkiAdvice, NkiWarning
from ..core.language.specialisation import WrongArguments, is_tensor, to_torch
from ..core.program import regions
from ..core.program.storage import Storage
from ..core.report import report
from ..core.run import compare
from ..core.run.execute import Plan
from ..core.time import cost
from ..core.time.schedule import Schedule, schedule
from ..errors import UsageError, nearest
from ..sandbox.foreign import place_of
from ..sandbox.records import Asked
from . import accuracy, aims, chains, chips, drafts, patterns, repairs, steps
from .accuracy import Accuracy
from .cases import KINDS, NAN, SIGNS, Arguments, Case, Spec
from .chips import traced
from .ranking import Signs, asked_of
from .references import Reference, comparable


@dataclass(frozen=True)
class Settings:
    """How a kernel is tried.

    Attributes:
        grid: launch grid.
        kinds: values that each case is tried with (`cases.KINDS`).
        seeds: of those values.
        tolerance: largest accepted error; by the types where None (`accuracy.TOLERANCES`).
        nan: "any": where the reference is NaN nothing is asked. "same": NaN is asked for exactly
            there, and NaN is among the inputs, too.
        dma_profile, order: of the estimate; without an order, that of the kernel's language.
        mends: look for a change of the kernel's source that makes it right.
    """

    grid: tuple[int, ...] = ()
    kinds: tuple[str, ...] = KINDS
    seeds: tuple[int, ...] = (0,)
    tolerance: float | None = None
    nan: str = "any"
    dma_profile: str = cost.DEFAULT_PROFILE
    order: str | None = None
    mends: bool = True

    def trials(self) -> list[tuple[str, int]]:
        """Kinds of values and seeds; zeros are the same for every seed."""
        kinds = (*self.kinds, *([NAN] if self.nan == "same" else []))
        return [
            (kind, seed)
            for kind in kinds
            for seed in (self.seeds[:1] if kind == "zeros" else self.seeds)
        ]


class Speed(NamedTuple):
    """The estimate of one kernel on one case.

    Attributes:
        time_ns, band_ns: estimate, and the times of a device that fit it.
        bound: class of resource that bounds it; `binding` says it in words.
        roofline_percent: share of the time that the chip's limits alone would need: the larger of
            products at TensorE's bf16 peak, and inputs and outputs once over a core's part of HBM.
        roofline_side: "compute" or "memory", whichever of the two is larger.
        macs: of all products but transposes.
        sbuf_bytes: most SBUF bytes per partition in use at once.
    """

    time_ns: float
    band_ns: tuple[float, float]
    bound: str
    binding: str
    roofline_percent: float
    roofline_side: str
    macs: int
    sbuf_bytes: int
    dma_profile: str
    estimated: bool = True


@dataclass
class Result:
    """One result tensor in one trial.

    Attributes:
        number: which of the kernel's results.
        kind, seed: the values.
        accuracy: of the kernel.
        plain: of the reference in the kernel's own types, None where it cannot be computed.
    """

    number: int
    kind: str
    seed: int
    accuracy: Accuracy
    plain: Accuracy | None


@dataclass
class Verdict:
    """The verdict on one kernel in one case.

    Attributes:
        case: its arguments.
        refusal: why the kernel is not legal, empty where it is.
        mismatch: what of the results cannot be compared, empty where all can.
        results: of all trials.
        speed, schedule: None for an illegal kernel; the second is not in JSON.
        places: sentences about the first wrong element and the first instruction that parts.
        types: sentences about results of other types than the reference's.
        warnings: of tracing and running, each once.
        doubtful: whether one of them is no mere advice (`NkiAdvice`).
    """

    case: str
    refusal: str = ""
    mismatch: str = ""
    results: list[Result] = field(default_factory=list)
    speed: Speed | None = None
    schedule: Schedule | None = None
    places: list[str] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    doubtful: bool = False

    @property
    def outcome(self) -> str:
        """legal, refused or unproven (docs/messages.md)."""
        if self.refusal:
            return refusals.REFUSED
        return refusals.UNPROVEN if self.doubtful else refusals.LEGAL

    @property
    def legal(self) -> bool:
        return not self.refusal

    @property
    def correct(self) -> bool:
        right = all(result.accuracy.correct for result in self.results)
        return self.legal and not self.mismatch and right

    @property
    def worst(self) -> Result | None:
        """The first wrong result, else the one with the largest error; None without any."""
        wrong = [r for r in self.results if not r.accuracy.correct]
        if wrong:
            return wrong[0]
        return max(self.results, key=lambda r: r.accuracy.largest, default=None)

    def to_json(self) -> dict[str, Any]:
        content = asdict(replace(self, schedule=None))
        del content["schedule"]
        content |= {"legal": self.legal, "correct": self.correct}
        content["outcome"] = self.outcome
        content["speed"] = None if self.speed is None else self.speed._asdict()
        return finite(content)


def judge(kernel: Kernel, reference: Reference | None, case: Case, settings: Settings) -> Verdict:
    """Trace, run and time a kernel on one case; without a reference it is not run.

    Raises:
        UsageError: the reference fails, or has the kernel's parameters in another order.
        Exception: what the kernel's Python body raises.
    """
    found = Verdict(str(case))
    if reference is not None:
        reference.check_order(kernel.function)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            program = traced(kernel, case, settings.grid)
        except (UsageError, WrongArguments, TimeoutError, MemoryError):
            raise
        except Exception as error:
            found.warnings = _listed(told)
            _refused(found, error, reference, kernel, case, settings)
            return found
        doubted = any(map(_to_mend, told))
        found.schedule = schedule(program, settings.dma_profile, settings.order)
        found.speed = speed_of(found.schedule, report.profile(found.schedule))
        if reference is not None:
            with _limits(case):
                _try(found, program, reference, kernel, case, settings)
        if doubted and found.correct and reference is not None:
            ways = _followed(reference, kernel, case, settings)
            if not ways or _WARNED in ways[0]:
                ways = _drafted(reference, kernel, case, settings, KINDS[0], 0)
            found.places = [f"without a warning: {ways[0]}", *ways[1:]] if ways else []
        if found.correct and not found.places and reference is not None and settings.mends:
            found.places = _more_exact(found, program, reference, kernel, case, settings)
    found.doubtful = doubtful(told)
    found.warnings = _listed(told)
    return found


@contextlib.contextmanager
def _limits(case: Case) -> Iterator[None]:
    """Name the limits of an index argument that has none, where one lies outside of a table."""
    try:
        yield
    except NkiError as error:
        rows = re.search(r"at run time, expected (-?\d+) to (\d+)", str(error))
        given = [*case.positional, *(value for _, value in case.named)]
        loose = [one for one in given if isinstance(one, Spec) and one.low is None]
        loose = [one for one in loose if not one.dtype.is_floating_point]
        if not rows or len(loose) != 1:
            raise
        said = str(error).partition("; ")[0]
        raise UsageError(
            f"{said}, as whole numbers are 0 to 99 without limits; write --arg "
            f"{loose[0]}:{rows[1]}..{rows[2]}."
        ) from error


def _more_exact(
    found: Verdict,
    program: Program,
    reference: Reference,
    kernel: Kernel,
    case: Case,
    settings: Settings,
) -> list[str]:
    """What makes a right kernel more exact whose error is near what is accepted, while the
    reference's own in these types is far from it: sums in bfloat16."""
    worst = found.worst
    if worst is None or settings.tolerance is not None or program.for_values:
        return []
    error, bound = worst.accuracy.largest, worst.accuracy.bound
    if error <= bound / 2 or worst.plain is None or worst.plain.largest > error / 8:
        return []
    strict, again = replace(settings, tolerance=error / 8, kinds=(worst.kind,)), Verdict("")
    _try(again, program, reference, kernel, case, strict)
    ways = [one for one in again.places if not one.startswith("first wrong")]
    return [f"its error of {error:.2g} is near the {bound:.2g} that are accepted:", *ways]


def _listed(told: Iterable[warnings.WarningMessage]) -> list[str]:
    return list(dict.fromkeys(f"{w.filename}:{w.lineno}: {w.message}" for w in told))


def _refused(
    found: Verdict,
    error: Exception,
    reference: Reference | None,
    kernel: Kernel,
    case: Case,
    settings: Settings,
) -> None:
    """Say why a kernel is not legal, and what makes it right; raise an error of its Python body
    again for which nothing is found."""
    found.refusal = str(error)
    grid = "sim_launch" in found.refusal
    settings = replace(settings, grid=()) if grid else settings
    if reference is not None:
        found.places = _called(reference, kernel, case, settings)
        found.places = found.places or _followed(reference, kernel, case, settings)
    if not isinstance(error, NkiError):
        found.refusal = f"{kernel.name} raises {type(error).__name__}: {error}".partition("; ")[0]
    elif found.places:
        found.refusal = f"{found.refusal.partition('; ')[0]} [{error.identifier}]"
    elif reference is not None:
        lines = re.findall(r"(?:\.py:|\blines? )(\d+)", found.refusal)
        names = re.findall(r"'(\w+)'", found.refusal)
        signs = Signs(frozenset(map(int, lines)), names=frozenset(names))
        found.places = _mends(None, reference, kernel, case, settings, signs=signs)
    ours = isinstance(error, NkiError) or place_of(error, (_file(kernel),))
    doubted = not found.places or _WARNED in found.places[0]
    if reference is not None and doubted and ours:
        found.places += _drafted(reference, kernel, case, settings, KINDS[0], 0)
    if found.places and grid:
        right = "launched without --grid the kernel is right on all values that were tried"
        more = len(found.places) > 1
        found.places = ["launch it without --grid:", *found.places] if more else [right]
    if not found.places and not isinstance(error, NkiError):
        raise error


def _file(kernel: Kernel) -> str:
    code = getattr(inspect.unwrap(kernel.function), "__code__", None)
    return str(getattr(code, "co_filename", ""))


def doubtful(told: Iterable[warnings.WarningMessage]) -> bool:
    """Whether a warning says that no source decides, or names a known defect."""
    kinds = (one.category for one in told)
    return any(issubclass(one, NkiWarning) and not issubclass(one, NkiAdvice) for one in kinds)


def _to_mend(told: warnings.WarningMessage) -> bool:
    """Whether a warning is no mere advice, or says that a comparison is always false."""
    return doubtful([told]) or "[sim_tensor_operator]" in str(told.message)


def kernel_of(module: ModuleType, name: str) -> Kernel:
    """A function of a module as a kernel, of the language whose names the module imports.

    Raises:
        LookupError: there is none.
    """
    found = getattr(module, name, None)
    if isinstance(found, Kernel):
        return found
    if not callable(found):
        known = [n for n, one in vars(module).items() if callable(one)]
        raise LookupError(f"it has no function '{name}'; {nearest(name, known)}")
    names = {str(getattr(value, "__name__", "")) for value in vars(module).values()}
    current = any(name.split(".")[0] == "nki" for name in names)
    return CurrentKernel(found) if current else Kernel(found)


# --- correct --------------------------------------------------------------------------------------
def _try(
    found: Verdict,
    program: Program,
    reference: Reference,
    kernel: Kernel,
    case: Case,
    settings: Settings,
    explain: bool = True,
) -> None:
    """Run the program on all kinds of values; say where the first wrong one comes from, or end
    there."""
    plan = Plan(program)
    types = [dtypes.host_dtype(storage.dtype) for storage in program.outputs]
    tolerance = settings.tolerance
    if tolerance is None:
        tolerance = accuracy.default_tolerance(types_of(program))
    trials = settings.trials()
    for kind, seed in trials:
        positional, named = case.values(kind, seed)
        inputs = tensors_of(positional, named)
        if program.for_values:
            program = traced(kernel, case, settings.grid, kind, seed)
            plan = Plan(program)
        got = [t.to(torch.float64) for t in run(program, plan, inputs)]
        arguments, trial = asked(program, positional, named), (kind, seed)
        hold(found, reference, arguments, types, got, tolerance, settings.nan, trial, explain)
        if found.mismatch:
            if explain:
                found.places = _mends(None, reference, kernel, case, settings, kind, seed)
                where = reference, kernel, case, settings, kind, seed
                found.places = found.places or _drafted(*where)
            return
        wrong = next((r for r in found.results if not r.accuracy.correct), None)
        if wrong is not None and not explain:
            return
        if wrong is not None and not found.places:
            found.places = places(program, inputs, wrong.number, wrong.accuracy, tolerance)
            found.places += reference.wraps(positional, named)
            if kind in ("zeros", "ties") and not types[wrong.number].is_floating_point:
                found.places.append(_EQUALS)
            traces = _named(kernel, case, settings, kind, seed)
            lines, names, shapes = patterns.signs(traces.program)
            born_at = re.findall(r":(\d+): instruction", " ".join(found.places))
            lines |= frozenset(map(int, born_at))
            way = _way(traces, reference, case, kind, seed) if settings.mends else steps.Way()
            signs = Signs(lines, way.lines, names, traces.shapes | shapes, aims=way.aims)
            mends = _mends(program, reference, kernel, case, settings, kind, seed, signs)
            if mends:  # they say more
                less = (_ELSE, _CLOSE)
                found.places = [p for p in found.places if not p.startswith(less)] + mends
            if not mends or mends[0].startswith(_OTHERS):
                exact = _as_tensors(reference.exact(*arguments), got)[wrong.number]
                others = way.said == steps.PLACES and not _same_numbers(got[wrong.number], exact)
                if way.said and kind == KINDS[0] and not others:
                    found.places = [p + f"; {way.said}" * (p == _ELSE) for p in found.places]
                found.places += _drafted(reference, kernel, case, settings, kind, seed)
        elif wrong is not None and not math.isfinite(wrong.accuracy.got):
            known = any(_BORN in said for said in found.places)
            born = None if known else compare.first_nonfinite(program, [_stored(t) for t in inputs])
            found.places += [f"with {kind} values the {_BORN}: {born}"] if born else []
        last = (kind, seed) == trials[-1] and {*KINDS} <= {*settings.kinds}
        if last and kind in settings.kinds and found.correct and not program.for_values:
            more = [(one, settings.seeds[0]) for one in (*SIGNS, HARDER[0])]
            far = (one for one in more if _far(program, plan, reference, case.values(*one)))
            trials += [*far][:1]


def _far(program: Program, plan: Plan, reference: Reference, arguments: Arguments) -> bool:
    """Whether a floating-point result is off by a part of its size, and by far more than the
    reference in its arguments' types."""
    got = [t.to(torch.float64) for t in run(program, plan, tensors_of(*arguments))]
    given = asked(program, *arguments)
    exact, plain = _as_tensors(reference.exact(*given), got), reference.plain(*given)
    if plain is None or reference.outputs is not None:
        return False
    for mine, own, theirs in zip(got, _as_tensors(plain, got), exact):
        judged = theirs.isfinite() & own.isfinite()
        errors = [(one - theirs)[judged].abs().max() for one in (mine, own) if judged.any()]
        size = theirs[judged].square().mean().sqrt()
        if errors and errors[0] > FAR * size and not errors[0] <= USUAL * errors[1]:
            return True
    return False


def _same_numbers(got: torch.Tensor, expected: torch.Tensor) -> bool:
    mine, theirs = (one.reshape(-1).sort().values for one in (got, expected.to(got.dtype)))
    return mine.shape == theirs.shape and torch.allclose(mine, theirs, 1e-3, 1e-5)


def _named(kernel: Kernel, case: Case, settings: Settings, kind: str, seed: int) -> aims.Named:
    anew = type(kernel)(kernel.function, kernel.grid, **kernel.options)  # keeps no program
    file = getattr(getattr(kernel.function, "__code__", None), "co_filename", "")
    return aims.named(lambda: traced(anew, case, settings.grid, kind, seed), file)


def _way(traces: aims.Named, reference: Reference, case: Case, kind: str, seed: int) -> steps.Way:
    """How far the kernel goes the reference's way, on values that tell steps apart."""
    program = traces.program
    arguments = case.values("tiny" if kind == "zeros" else KINDS[0], seed)
    if len(program) > patterns.MOST_INSTRUCTIONS:
        return steps.Way()
    with contextlib.suppress(Exception, SystemExit), repairs.quiet():
        inputs = [_stored(t) for t in tensors_of(*arguments)]
        return steps.way(traces, inputs, reference, asked(program, *arguments))
    return steps.Way()


def _called(reference: Reference, kernel: Kernel, case: Case, settings: Settings) -> list[str]:
    """Arguments with which kernel and reference are right where both fail with those of a case."""
    if not settings.mends:
        return []
    with contextlib.suppress(UsageError):
        reference.exact(*case.values(KINDS[0], 0))
        return []
    for other in case.otherwise():
        with repairs.quiet(), contextlib.suppress(Exception, SystemExit):
            tried = _Tried(None, reference, kernel, other, settings, KINDS[0], 0)
            if tried.followed(kernel.function) == []:
                given = " ".join(f"--arg {word}" for word in other.words)
                said = "the reference fails with these arguments, too; kernel and reference are"
                return [f"{said} right with {given}"]
    return []


def _followed(
    reference: Reference | None, kernel: Kernel, case: Case, settings: Settings
) -> list[str]:
    """The changes to which messages lead, one after the other, where they end in a right kernel;
    without a reference in one that is accepted without a warning."""
    if not settings.mends:
        return []
    tried = _Tried(None, reference, kernel, case, settings, KINDS[0], 0)
    what = "right on all values that were tried" if reference else _ACCEPTED
    with repairs.quiet(), contextlib.suppress(Exception):  # the refusal is to be told anyway
        return chains.Chain(kernel.function, tried.followed).told(what)
    return []


def accepted(kernel: Kernel, case: Case, grid: tuple[int, ...]) -> list[str]:
    """The lines with which a refused kernel is accepted, as far as messages lead there."""
    return _followed(None, kernel, case, Settings(grid))


def _drafted(
    reference: Reference, kernel: Kernel, case: Case, settings: Settings, kind: str, seed: int
) -> list[str]:
    """A right kernel that is written from the reference."""
    if not settings.mends:
        return []
    tried = _Tried(None, reference, kernel, case, settings, kind, seed)
    with repairs.quiet():
        return drafts.told(kernel.function, reference, tried.arguments, tried.followed)


def _mends(
    program: Program | None,
    reference: Reference,
    kernel: Kernel,
    case: Case,
    settings: Settings,
    kind: str = KINDS[0],
    seed: int = 0,
    signs: Signs = Signs(),  # noqa: B008 - has no state
) -> list[str]:
    """Changes of the kernel's source that make it legal and right, on values of another seed, too.

    Args:
        program: of the kernel as it is; None where it is refused.
        signs: where to begin.
        kind, seed: values on which it fails.
    """
    if not settings.mends:
        return []
    tried = _Tried(program, reference, kernel, case, settings, kind, seed)
    tracing = 1e-3 + 2e-9 * sum(one.nbytes for one in tried.inputs)

    def of_kernel(function: Callable) -> bool:
        tried.spend(tracing)  # what is refused
        made = tried.kernel(function)
        return tried.right(made, traced(made, case, settings.grid, kind, seed), reference)

    def of_reference(function: Callable) -> bool:
        assert program is not None
        answer = Reference(function, reference.library, reference.outputs)
        return tried.right(kernel, program, answer)

    with repairs.quiet(), contextlib.suppress(Exception, SystemExit):
        launched = () if settings.grid else traced(kernel, case, (2,), kind, seed)
        if launched and tried.right(kernel, launched, reference):
            return ["launched with --grid 2 the kernel is right on all values that were tried"]
    numbers, words = asked_of(reference.function)
    signs = signs._replace(numbers=numbers, words=words)
    found: list[repairs.Change] = []
    with contextlib.suppress(Exception):  # the verdict is to be told anyway
        found = repairs.repairs(kernel.function, of_kernel, tried.faults, signs)
    if found or program is None:
        said = [
            f"{one.place}: with {one.words} the kernel is right on all values that were tried"
            + one.but
            for one in found
        ]
        several = f"each of these {len(said)} changes does, so look which line is not as you meant"
        return said + [several] * (len(said) > 1)
    tried.work = 0.0
    return [
        f"{_OTHERS} with {one.words} at {one.place}: one of the two is wrong"
        for one in repairs.repairs(reference.function, of_reference)
    ]


class _Tried:
    """A wrong kernel and the values on which changed ones are tried, with the time that it took."""

    def __init__(
        self,
        program: Program | None,
        reference: Any,
        kernel: Kernel,
        case: Case,
        settings: Settings,
        kind: str,
        seed: int,
    ) -> None:
        self.program, self.reference, self.case, self.seed = program, reference, case, seed
        self.kernel = lambda function: type(kernel)(function, kernel.grid, **kernel.options)
        self.arguments = case.values(kind, seed)
        self.inputs = tensors_of(*self.arguments)
        seeds = dict.fromkeys([*settings.seeds, seed, seed + 1])
        self.settings = replace(settings, seeds=tuple(seeds))
        self.idle: set[Any] | None = set() if program is None else patterns.idle(program)
        self.types = None if program is None else types_of(program)
        self.known: list[torch.Tensor] = []  # results of the reference as it is
        self.work, self.begun = 0.0, time.thread_time()
        self.usual = 0 if program is None else self._doubts(self.kernel(kernel.function))[1]

    def followed(self, function: Callable) -> list[str] | None:
        """None where a changed function is wrong, else its warnings; raises what it does. Without
        a reference it is wrong where it has warnings or leaves arguments unread."""
        self.idle = None  # what nobody reads is the author's
        self.spend(1e-3 + 2e-9 * sum(one.nbytes for one in self.inputs))  # what is refused
        made = self.kernel(function)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            program = traced(made, self.case, self.settings.grid, KINDS[0], 0)
        said = [f"{w.filename}:{w.lineno}: {w.message}" for w in told if _to_mend(w)]
        if self.reference is None:
            return None if said or patterns.unread(program) else said
        # a condition that is always true is right by chance
        chance = any("sim_tensor_truth" in one for one in said)
        return said if not chance and self.right(made, program, self.reference) else None

    def spend(self, seconds: float) -> None:
        self.work += seconds
        if self.work > SECONDS or time.thread_time() - self.begun > LONGEST:
            raise repairs.Enough

    def right(self, made: Kernel, changed: Program, answer: Reference) -> bool:
        """Whether a changed kernel's results are an answer's, or a changed reference's its own."""
        self.spend(_seconds(changed))
        # One that computes less returns an argument; results of fewer bits may differ more.
        less = self.idle is not None and patterns.idle(changed) - self.idle
        if less or self.types not in (None, types_of(changed)):
            return False
        if answer.outputs is None and not self._may_be(changed, answer):
            return False
        self.work += _seconds(changed) * len(self.settings.trials())
        again = Verdict("")
        _try(again, changed, answer, made, self.case, self.settings, False)
        return again.correct and not self._asks_less(answer, changed) and not self._bursts(changed)

    def faults(self, function: Callable) -> tuple[int, int, str]:
        """How many signs there are that a kernel which is right on the case's values is so by
        chance: warnings, chips that refuse it, parts that it does not read, other sizes at which it
        is wrong, and values less than what norms add to a variance. At how many more sizes it is
        not right than right, as it does not have to take all; and where it is wrong, in words."""
        made = self.kernel(function)
        program, doubts = self._doubts(made)
        self.work += 4 * _seconds(program)
        others = [*self.case.at_other_sizes()]
        right = [self._still(made, other, self.settings.kinds[0]) for other in others]
        hard = [self._still(made, self.case, kind) for kind in HARDER]
        doubts = max(0, doubts - self.usual) + len(patterns.unread(program))
        faults = [*right, *hard].count(False) + doubts
        where = [f"at {case}" for case, one in zip(others, right) if one is False]
        where += [f"with --values {HARDER[0]}"] * (hard[0] is False)  # many cancel at an offset
        but = f", though not {where[0]}" if where else repairs.CHANCE * bool(doubts)
        return faults, len(others) - 2 * right.count(True), but

    def _still(self, made: Kernel, case: Case, kind: str) -> bool | None:
        """Whether a changed kernel is right on another case, too; None where it is refused."""
        once = replace(self.settings, kinds=(kind,), seeds=(self.seed,))
        again = Verdict("")
        with contextlib.suppress(Exception, SystemExit):
            if time.thread_time() - self.begun < LONGEST:
                program = traced(made, case, once.grid)
                _try(again, program, self.reference, made, case, once, False)
                return again.correct
        return None

    def _doubts(self, kernel: Kernel) -> tuple[Program, int]:
        """The program of a kernel, and how many warnings and other chips stand against it."""
        grid = self.settings.grid
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            program = traced(kernel, self.case, grid, self.settings.kinds[0], self.seed)
        refused = sum(map(bool, chips.others(kernel, self.case, grid).values()))
        return program, refused + sum(map(doubtful, ([one] for one in told)))

    def _may_be(self, changed: Program, answer: Reference) -> bool:
        """Whether results on the failing values are near: a test that costs little."""
        got = run(changed, Plan(changed, False), self.inputs)
        same = answer is self.reference
        expected = same and self.known or answer.exact(*asked(changed, *self.arguments))
        if same:
            self.known = expected
        limit = self.settings.tolerance or accuracy.default_tolerance(types_of(changed))
        pairs = zip(got, _as_tensors(expected, got))
        return all(_near(one, other, limit) for one, other in pairs)

    def _asks_less(self, answer: Reference, changed: Program) -> bool:
        """Whether another reference has NaN, where nothing is asked, for a number."""
        for trial in self.settings.trials() if answer is not self.reference else ():
            arguments = asked(changed, *self.case.values(*trial))
            for one, other in zip(answer.exact(*arguments), self.reference.exact(*arguments)):
                if (one.isnan() & ~other.isnan()).any():
                    return True
        return False

    def _bursts(self, changed: Program) -> bool:
        """Whether large values become NaN that do not in the kernel as it is, nor the reference."""
        arguments = self.case.values("large", self.seed)
        large = tensors_of(*arguments)
        both = (run(one, Plan(one), large) for one in (changed, self.program) if one is not None)
        now, *before = (any(t.isnan().any() for t in results) for results in both)
        if not now or before != [False]:
            return False
        return not any(t.isnan().any() for t in self.reference.exact(*asked(changed, *arguments)))


def _seconds(program: Program) -> float:
    """About what it takes to trace and run a program once: counted, so that it is the same in every
    run."""
    elements = sum(view.size for one in program for view in one.dst)
    return 6e-5 * len(program) + 2e-9 * elements + 2e-11 * program.macs


def _near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether a result may be right, by some of its elements: a test that costs little."""
    if got.shape != expected.shape:
        return False
    step = got.numel() // SOME | 1  # odd, so that all columns are among them
    got, expected = got.reshape(-1)[::step], expected.reshape(-1)[::step]
    judged = expected.isfinite()
    apart = (got.to(torch.float64) - expected)[judged].abs()
    size = expected[judged].square().mean().sqrt()
    limit = 1.0 if not got.is_floating_point() else accuracy.CAP * tolerance
    return bool((apart <= limit * (expected[judged].abs() + size) + 1e-30).all())


def hold(
    found: Verdict,
    reference: Reference,
    arguments: Arguments,
    types: Sequence[torch.dtype],
    got: Sequence[torch.Tensor],
    tolerance: float,
    nan: str,
    trial: tuple[str, int],
    both: bool = True,
) -> None:
    """Hold results of `types` (`got`, in float64) against the reference's, into the verdict; `both`
    has the reference's own errors beside."""
    exact, plain = reference.exact(*arguments), reference.plain(*arguments)
    if reference.outputs is not None:
        got = comparable(reference.outputs, got, exact, arguments[0])
        plain = plain and comparable(reference.outputs, plain, exact, arguments[0])
    exact, plain = _as_tensors(exact, got), plain and _as_tensors(plain, got)
    found.types = [] if plain is None else other_types(types, reference.types, arguments)
    found.mismatch = mismatch(got, exact)
    if found.mismatch:
        if reference.outputs is not None:
            name = getattr(reference.outputs, "__name__", "")
            found.mismatch += f" from outputs {name}, which takes both and gives what is compared"
        return
    same = nan == "same"
    # PyTorch sums in fp32 whatever the types; numpy in bf16, which excuses nothing.
    wide = all(t.dtype.itemsize > 2 for t in tensors_of(*arguments) if t.is_floating_point())
    for number, dtype in enumerate(types):
        right, other = exact[number], None if plain is None else plain[number]
        if other is not None and other.shape != right.shape:
            other = None
        excuse = other if reference.library == "torch" or wide else None
        if not dtype.is_floating_point:
            right = _in_last_bits(reference, arguments, number, got[number], right)
        mine = accuracy.measure(got[number], right, dtype, tolerance, excuse, same)
        beside = None
        if other is not None and both:
            beside = accuracy.measure(other, right, dtype, tolerance, other, same)
        found.results.append(Result(number, *trial, mine, beside))


def _in_last_bits(
    reference: Reference, arguments: Arguments, number: int, got: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    """Whole numbers of a reference; of a few that are one off what the kernel has, where arguments
    that differ in their last bits give it: ties of rounding that no float32 decides."""
    wrong = got != right
    few = 0 < int(wrong.sum()) <= RARE * wrong.numel() and (got - right)[wrong].abs().max() <= 1
    for seed in range(NUDGES if few and reference.outputs is None else 0):
        generator = torch.Generator().manual_seed(seed)

        def nudged(one: Any, generator: torch.Generator = generator) -> Any:
            if not isinstance(one, torch.Tensor) or not one.is_floating_point():
                return one
            signs = torch.randint(0, 2, one.shape, generator=generator) * 2 - 1
            return one.to(torch.float64) * (1 + LAST_BITS * signs)

        positional, named = arguments
        moved = [nudged(v) for v in positional], {k: nudged(v) for k, v in named.items()}
        with contextlib.suppress(UsageError):
            other = reference.exact(*moved)[number]
            right = torch.where(wrong & (other == got), got, right)
    return right


def types_of(program: Program) -> list[torch.dtype]:
    """Types of a kernel's arguments and results."""
    return [dtypes.host_dtype(s.dtype) for s in (*program.inputs, *program.outputs)]


def asked_for(case: Case, grid: tuple[int, ...]) -> Asked:
    """What a record of a case has to have."""
    tensors = tensors_of(*case.meta())
    inputs = [(tuple(t.shape) or (1,), dtypes.to_dtype(t.dtype).name) for t in tensors]
    return Asked(tuple(inputs), grid)


def tensors_of(positional: Sequence[Any], named: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors among arguments, in the order of `Program.inputs`."""
    values = [*positional, *(named[name] for name in sorted(named))]
    return [v if isinstance(v, torch.Tensor) else to_torch(v) for v in values if is_tensor(v)]


def run(program: Program, plan: Plan, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results in the types and shapes that the kernel returns; `inputs` do not change."""
    copies = [_stored(t).clone().contiguous() for t in inputs]
    results = []
    for storage, shape, raw in zip(program.outputs, program.output_shapes, plan.run(copies)):
        if storage.dtype is dtypes.FLOAT8_E4M3:  # the caller's type has numbers for its infinity
            raw = torch.where(raw & 0x7F >= 0x78, 0x7F, raw)
        host = raw.view(dtypes.host_dtype(storage.dtype)) if raw.dtype.itemsize == 1 else raw
        results.append(host.reshape(shape))
    return results


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """The simulator holds fp8 e4m3 as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def asked(program: Program, positional: Sequence[Any], named: dict[str, Any]) -> Arguments:
    """Arguments of the reference: the kernel's, without tensors that are only results."""
    if program.returns:
        return list(positional), named
    written = {id(storage) for storage in program.outputs}
    tensors = tensors_of(positional, named)
    results = {id(t) for s, t in zip(program.inputs, tensors) if id(s) in written}
    kept = {name: value for name, value in named.items() if id(value) not in results}
    return [value for value in positional if id(value) not in results], kept


def _as_tensors(exact: list[torch.Tensor], got: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A reference's numbers in the shape of a kernel's results, which have one axis at least."""
    sizes = [one.shape if one.numel() == 1 else torch.Size() for one in got]
    sizes += [torch.Size()] * len(exact)
    return [one.reshape(size) if one.ndim == 0 else one for one, size in zip(exact, sizes)]


def mismatch(got: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> str:
    """Results that cannot be compared with the reference's, in words; empty where all can."""
    if len(got) != len(exact):
        return (
            f"the kernel returns {len(got)} tensors, expected the reference's {len(exact)}; return "
            "as many, in the kernel or in the reference"
        )
    for number, (mine, theirs) in enumerate(zip(got, exact)):
        if mine.shape != theirs.shape:
            return (
                f"result {number} has shape {tuple(mine.shape)}, expected the reference's "
                f"{tuple(theirs.shape)}; return that shape"
            )
    return ""


def other_types(
    mine: Sequence[torch.dtype], theirs: Sequence[str], arguments: Arguments
) -> list[str]:
    """Results whose type holds less than the reference's type for the same arguments.

    numpy returns float64 of constants, which no kernel has: only types of 32 bits and fewer count.
    It has no products in bfloat16: a result of the type that all floating-point arguments have is
    as meant.
    """
    said = []
    floats = {t.dtype for t in tensors_of(*arguments) if t.dtype.is_floating_point}
    for number, (own, name) in enumerate(zip(mine, theirs)):
        other = getattr(torch, name, None)
        if not isinstance(other, torch.dtype) or other.itemsize > 4 or not other.is_floating_point:
            continue
        if floats == {own}:
            continue
        if not own.is_floating_point or own.itemsize < other.itemsize:
            is_type = str(own).removeprefix("torch.")
            said.append(
                f"result {number} is {is_type} where the reference returns {name} for these "
                f"arguments; cast in the reference to {is_type} if that is meant, or give it "
                f"dtype=nl.{name}"
            )
    return said


_BORN = "first instruction whose result is infinite or NaN"
RARE, NUDGES, LAST_BITS = 1e-3, 8, 2.0**-21  # whole numbers that are ties, and how they are found
USUAL = 16  # times the error of the reference in its arguments' types
FAR = 0.1  # of a result's size, by which those of tiny values, or of one sign, may be off
HARDER = ("tiny", "offset")  # values with which a mend may prove to be chance
SOME = 5_000  # elements that are looked at first
_ACCEPTED = "accepted (--ref FILE:FUNCTION tells whether it is right)"
SECONDS = 6.0  # of trying changes of a wrong kernel, on one core, counted
LONGEST = 12.0  # the same by the clock of the thread, for references that take long
_WARNED = "with a warning"
_ELSE = (
    "no instruction parts from the same kernel in fp32: it computes something else than the "
    "reference, or values cancel in fp32"
)
_OTHERS = "the kernel computes what the reference would"
_CLOSE = "the largest error is"
_EQUALS = "where one of several equal values may be chosen, let a function compare: --outputs"
NEAR = 5.0  # times the accepted error, up to which rounding may be the reason
ROUNDINGS = 30.0  # times what changed last bits make, up to which it is told as the reason


# --- where ----------------------------------------------------------------------------------------
def places(
    program: Program, inputs: Sequence[torch.Tensor], number: int, wrong: Accuracy, tolerance: float
) -> list[str]:
    """Where a wrong element was stored, and the first instruction that explains it.

    Args:
        number: which of the results is wrong.
        wrong: its accuracy, with the first wrong element.
    """
    assert wrong.first is not None
    writer = _writer(program, number, wrong.first)
    said = [
        f"first wrong element: {wrong.first} is {wrong.got:.7g}, expected {wrong.expected:.7g}"
        + (f"; stored at {writer}" if writer else "")
    ]
    said += [wrong.pattern] if wrong.pattern else []
    said += patterns.unread(program)
    copies = [_stored(t) for t in inputs]
    if not math.isfinite(wrong.got):
        born = compare.first_nonfinite(program, copies)
        said += [f"{_BORN}: {born}"] if born else []
        return said
    parted = compare.compare(program, copies, max(tolerance, 1e-6)).parts
    if parted is None and _is_rounding(program, copies, wrong):
        said.append(
            f"{_CLOSE} {wrong.largest:.2g} and {wrong.bound:.2g} are accepted: sums "
            "of many numbers in another order differ by as much, so give --tolerance, or look for "
            "the line where values cancel"
        )
    elif parted is None:
        said.append(_ELSE)
    else:
        said.append(f"first instruction that parts from the same kernel in fp32: {parted}")
    return said


def _is_rounding(program: Program, inputs: list[torch.Tensor], wrong: Accuracy) -> bool:
    """Whether an error is about as large as what last bits, changed at random, make of a result."""
    if wrong.largest > NEAR * wrong.bound:
        return False
    return compare.compare(program, inputs, wrong.largest / ROUNDINGS, "noise").parts is not None


def _writer(program: Program, number: int, where: tuple[int, ...]) -> str:
    """FILE:LINE of the last instruction that stores an element of a result."""
    storage, shape = program.outputs[number], program.output_shapes[number]
    if len(where) != len(shape) or any(at >= size for at, size in zip(where, shape)):
        return ""  # what is compared has another shape than what is stored
    at = int(np.ravel_multi_index(where, shape)) if where else 0
    for instruction in reversed(program.instructions):
        for view in instruction.dst:
            if view.storage is not storage or view.by_data is not None:
                continue
            if (regions.elements(view, np.ones(view.shape, bool)) == at).any():
                return str(instruction.source or "")
    return ""


# --- fast -----------------------------------------------------------------------------------------
def speed(program: Program, settings: Settings) -> Speed:
    """The estimate, and how near it is to the chip's limits."""
    found = schedule(program, settings.dma_profile, settings.order)
    return speed_of(found, report.profile(found))


def speed_of(found: Schedule, summary: report.Profile) -> Speed:
    """The same of a schedule and its figures."""
    program, figures = found.program, summary.metrics
    sides = {
        "compute": program.macs / program.core.peak_macs_per_ns,
        "memory": _needed_bytes(program) / program.core.hbm_bytes_per_ns,
    }
    side = max(sides, key=lambda name: sides[name])
    return Speed(
        time_ns=found.total,
        band_ns=summary.band_ns,
        bound=summary.bound,
        binding=summary.binding,
        roofline_percent=100 * sides[side] / found.total if found.total else 0.0,
        roofline_side=side,
        macs=program.macs,
        sbuf_bytes=int(figures["sbuf_high_water_bytes"]),
        dma_profile=found.profile,
    )


def _needed_bytes(program: Program) -> int:
    """Bytes of inputs and outputs that a program moves, each element once: a gather reads a part of
    its table only."""
    bases = dict(program.aliases)
    moved: Counter[Storage] = Counter()
    for instruction in program:
        for _, view in instruction.accesses():
            size = math.prod(view.shape) * view.dt.itemsize
            moved[bases.get(view.storage, view.storage)] += size
    ends = dict.fromkeys((*program.inputs, *program.outputs))
    return sum(min(s.size * s.dtype.itemsize, moved[s]) for s in ends)


def hold_above(program: Program, time_ns: float) -> None:
    """Refuse with a ValueError an estimate below what no kernel of these results undercuts: its
    products at TensorE's peak, and results once over HBM."""
    results = sum(s.size * s.dtype.itemsize for s in {id(s): s for s in program.outputs}.values())
    core = program.core
    least = max(program.macs / core.peak_macs_per_ns, results / core.hbm_bytes_per_ns)
    least /= program.cores
    if time_ns < least:
        raise ValueError(
            f"an estimate of {time_ns:.3g} ns, expected at least {least:.3g}, which its arguments, "
            "results and products alone take"
        )


def finite(value: Any) -> Any:
    """JSON has no infinities and no NaN: they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value
