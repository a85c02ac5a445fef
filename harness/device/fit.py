"""The constants of the cost model with which it gives the times that a device showed.

Nonlinear least squares on logarithms of times (Gauss-Newton, derivatives by differences; Nocedal
and Wright 2006, chapter 10). Rows that no constants explain weigh less (Huber 1964), and are named.
A switch of the model is changed where that explains the times that much better. Errors are two
standard deviations of the linearised problem; where one exceeds TOLD, the times cannot tell it.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional

import numpy as np

from harness.device import model
from harness.device.plan import of_row
from harness.device.rows import ROWS
from harness.simulator import COMPILER_ORDER, Engine, NeuronCore, cost

STEP = 0.02  # of a logarithm, for derivatives
LATE, WIDE = "ramp_ns", 0.2  # it changes times product by product; moves when clocks are near
TOLD = 0.05  # two standard deviations, relative, of a constant that the times tell
ALIKE = 0.9  # correlation of constants that trade with each other
LOOSE = 1.0  # standard deviation of a logarithm before anything is measured
NOISE, NOISE_US = 0.005, 0.3  # of a time: relative, and what a clock reads
HUBER = 3.0
BETTER, EARNED = 0.6, 12.0  # a switch leaves this share of the misfit, and takes off so much
OFF = 0.1  # a row that differs by more is not explained
ITERATIONS, FRESH, QUICK, SWITCHES = 7, 3, 3, 3  # FRESH: steps that one set of derivatives serves
LIKELY = 2  # switches that are solved to the end
Slopes = dict[str, np.ndarray]  # by constant, of every row
_MISFIT = operator.attrgetter("misfit")
CYCLES = 20.0  # a constant that is 0 moves by such steps instead of logarithms

AROUND = {
    "GRAPH_LAUNCH_NS": "graph_ns", "KERNEL_LAUNCH_NS": "kernel_ns",
    "COLLECTIVE_START_NS": "collective_ns", "COLLECTIVE_BYTES_PER_NS": "collective_bytes_per_ns",
}  # fmt: skip
ENGINES = tuple(e.value for e in Engine if e is not Engine.DMA)
_CORE = (
    *(f"clock_hz.{e}" for e in ENGINES), "min_ii", "dependent_cycles",
    *(f"engine_start_cycles.{e}" for e in ENGINES), "tensor_pace", "half_rows_pace", "dma.start_ns",
    "dma.lone_row_ns", "dma.descriptor_ns",
)  # fmt: skip
_SOME = ("ramp_ns", "dma.one_index_ns")  # which a generation has that knows the mechanism
_ROWS = {  # by DMA profile
    "sdk2.25": ("dma.bytes_per_ns", "dma.row_2_24_ns", "dma.part_word_ns"),
    "sdk2.21": ("dma.bytes_per_ns", "dma.flat_bytes_per_ns", "dma.row_ns"),
    "row-rule": ("dma.bytes_per_ns", "dma.short_row_ns", "dma.row_ns"),
}
_ROWS_OF_TODAY = ("dma.today_bytes_per_ns", "dma.row_ns", "dma.part_word_ns")  # from gen3 on
SWITCHED = ("exclusive_ports", "dma.fixed_lanes", "dma.today_fixed", "dma.today_issued")
_ISSUE = ("dma.issue_ns", "dma.issue_row_ns")


@dataclass(frozen=True)
class Variant:
    """One set of mechanisms.

    Attributes:
        core: the generation with its switches.
        today: the kernels are those of `nki`.
        profile: form of short rows; order: of an engine's instructions, None for the usual one.
        changed: names of the switches that differ from the cost model's.
    """

    core: NeuronCore
    today: bool = False
    profile: str = cost.DEFAULT_PROFILE
    order: Optional[str] = None
    changed: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Constants that times may depend on."""
        dma, rows = self.core.dma, _ROWS[self.profile]
        if self.today and dma.today_bytes_per_ns and self.profile == cost.DEFAULT_PROFILE:
            rows = _ROWS_OF_TODAY
        issued = dma.issue_ns and (dma.today_issued or not self.today)
        some = [name for name in _SOME if value_of(self.core, name)]
        some += [f"result_cycles.{e.value}" for e in self.core.result_cycles]
        return (*_CORE, *some, *rows, *(_ISSUE if issued else ()), *model.OVERHEADS)


MECHANISMS = {
    "ports": "whether VectorE shares its ports of SBUF with GpSimdE and of PSUM with ScalarE",
    "fixed lanes": "whether partitions have fixed places on DMA engines",
    "issue": "whether one queue issues every transfer, one after the other",
    "order": "whether engines leave the order in which a kernel is written",
    "sdk2.21": "rows of up to 1 KiB move at a rate of their own",
    "row-rule": "each row takes a time of its own beside its bytes",
}


def switched(variant: Variant, name: str) -> Variant:
    """The variant with one mechanism the other way."""
    core, changed = variant.core, (*variant.changed, name)
    fixed, dma = ("dma.fixed_lanes", "dma.today_fixed")[variant.today], core.dma
    issue = {"dma.today_issued": float(not dma.today_issued)} if variant.today else {}
    if not (variant.today and dma.issue_ns):  # as a Trainium2 has it, or as a Trainium1
        issue |= dict(zip(_ISSUE, (0.0, 0.0) if dma.issue_ns else (485.0, 0.75)))
    switches: dict[str, dict[str, Any]] = {
        "ports": {"exclusive_ports": not core.exclusive_ports},
        "fixed lanes": {fixed: not value_of(core, fixed)},
        "issue": issue,
    }
    if name in switches:
        return replace(variant, core=cost.with_constants(core, switches[name]), changed=changed)
    if name == "order":
        order = COMPILER_ORDER if variant.today else "program-order"
        return replace(variant, order=order, changed=changed)
    return replace(variant, profile=name, changed=changed)


def value_of(core: NeuronCore, name: str) -> float:
    """A constant as the generation has it."""
    if name in model.OVERHEADS:
        return model.overheads()[name]
    part, _, rest = name.partition(".")
    held = getattr(core, part)
    if part == "dma":
        return getattr(held, rest)
    return held[Engine(rest)] if rest else held


class Problem:
    """Measured rows, and what a variant says of them under any constants."""

    def __init__(self, measured: Mapping[str, float], today: bool) -> None:
        self.rows, self.today = [name for name in ROWS if name in measured], today
        self.calls = [of_row(ROWS[name], today).call for name in self.rows]
        self.times = np.array([measured[name] for name in self.rows])
        self.sigma = np.hypot(NOISE, NOISE_US / self.times)
        self.core = model.program(self.calls[0]).core

    def values(self, variant: Variant, u: np.ndarray) -> dict[str, float]:
        """Constants by name: the cost model's times exp(u), or as many CYCLES where it has 0."""
        found = {}
        for name, one in zip(variant.names, u):
            prior = value_of(variant.core, name)
            found[name] = prior * float(np.exp(one)) if prior else CYCLES * float(one)
        return found

    def predicted(
        self, variant: Variant, u: np.ndarray, rows: Optional[np.ndarray] = None
    ) -> np.ndarray:
        """Microseconds of every row, or of the rows whose numbers are given."""
        values = self.values(variant, u)
        costs = {name: values.pop(name) for name in model.OVERHEADS}
        core = cost.with_constants(variant.core, values)
        found = []
        for row in range(len(self.calls)) if rows is None else rows:
            call = self.calls[row]
            model.program(call).core = core
            found.append(model.graph_ns(call, costs, variant.profile, variant.order) / 1e3)
            model.program(call).core = self.core  # whoever asks next is told the model's own
        return np.array(found)

    def derivatives(
        self, variant: Variant, u: np.ndarray, at: np.ndarray, kept: Slopes, masks: Slopes
    ) -> Slopes:
        """Derivatives of the logarithms of times, by constant; those in ``kept`` are not made anew.

        A row on which an engine's constant had no influence before (``masks``) has none now. Rows
        of DMA bend where one limit takes over from another, so these are all tried again.
        """
        found = {}
        for k, name in enumerate(variant.names):
            if name in kept:
                found[name] = kept[name]
                continue
            fixed = name in masks and not name.startswith("dma.")
            rows: np.ndarray = np.flatnonzero(masks[name]) if fixed else np.arange(len(at))
            moved, step = u.copy(), WIDE if name == LATE else STEP
            moved[k] += step
            found[name] = np.zeros(len(at))
            found[name][rows] = (np.log(self.predicted(variant, moved, rows)) - at[rows]) / step
        return found

    def solve(
        self, variant: Variant, u: np.ndarray, iterations: int, before: Optional["Solution"] = None
    ) -> "Solution":
        """Gauss-Newton from ``u``; with the slopes of ``before``, which are then not made anew."""
        slopes: Slopes = {}
        best: Optional[Solution] = None
        known = np.eye(len(u)) / LOOSE**2
        for turn in range(iterations):
            at = np.log(self.predicted(variant, u))
            apart = (np.log(self.times) - at) / self.sigma
            weights = np.minimum(1.0, HUBER / np.maximum(np.abs(apart), 1e-9))
            misfit = float((weights * apart**2).sum())
            late = turn >= FRESH or before is not None
            if best is not None and late and misfit > 0.99 * best.misfit:
                break
            if turn % FRESH == 0 and (before is None or turn == 0):
                kept = before.slopes if before is not None else {}
                slopes = self.derivatives(variant, u, at, kept, slopes)
            moves = [slopes[name] * (late or name != LATE) for name in variant.names]
            scaled = np.array(moves).T / self.sigma[:, None]
            normal = scaled.T @ (weights[:, None] * scaled) + known
            best = Solution(variant, u, slopes, normal, misfit, np.exp(at))
            step = np.linalg.solve(normal, scaled.T @ (weights * apart) - known @ u)
            u = u + np.clip(step, -0.7, 0.7)
        assert best is not None
        return best


class Solution(NamedTuple):
    """Constants that fit, slopes there, and the matrix of the normal equations."""

    variant: Variant
    u: np.ndarray
    slopes: Slopes
    normal: np.ndarray
    misfit: float
    predicted: np.ndarray


def best_of(problem: Problem) -> Solution:
    """The mechanisms and constants that explain the times; each switch has to earn its place."""
    base = Variant(problem.core, problem.today)
    found = problem.solve(base, np.zeros(len(base.names)), ITERATIONS)
    while found.misfit > EARNED and len(found.variant.changed) < SWITCHES:
        known, tried = dict(zip(found.variant.names, found.u)), []
        taken = (*found.variant.changed, found.variant.profile)
        for name in (one for one in MECHANISMS if one not in taken):
            variant = switched(found.variant, name)
            u = np.array([known.get(one, 0.0) for one in variant.names])
            tried.append(problem.solve(variant, u, QUICK, found))
        likely = sorted(tried, key=_MISFIT)[:LIKELY]
        best = min((problem.solve(one.variant, one.u, ITERATIONS) for one in likely), key=_MISFIT)
        if best.misfit > min(BETTER * found.misfit, found.misfit - EARNED):
            break
        found = best
    return found


def profile_of(found: Mapping[str, Any], name: str, note: str) -> dict[str, Any]:
    """A fit as the cost model reads it (`cost.MEASURED`), its switches among the constants."""
    values = {constant: one["value"] for constant, one in found["constants"].items()}
    around = {field: values.pop(constant) for constant, field in AROUND.items()}
    del values["GRAPH_START_NS"]  # what `nki.benchmark` adds is no part of a kernel
    return {
        "name": name, "note": note, "rows": found["profile"], "generation": found["generation"],
        "constants": values | found["switches"], "around": around,
    }  # fmt: skip


def fit(measured: Mapping[str, float], today: bool = False) -> dict[str, Any]:
    """Constants, mechanisms and rows as plain data, of microseconds by row, for the generation in
    force and one of the languages."""
    problem = Problem(measured, today)
    found = best_of(problem)
    values = problem.values(found.variant, found.u)
    freedom = max(1, len(problem.rows) - len(found.u))
    covariance = np.linalg.inv(found.normal) * max(1.0, found.misfit / freedom)
    errors = np.sqrt(np.diag(covariance))
    alike = np.abs(covariance / np.outer(errors, errors)) > ALIKE
    constants = {}
    for k, name in enumerate(found.variant.names):
        prior = value_of(problem.core, name)
        error = 2 * errors[k] * (values[name] if value_of(found.variant.core, name) else CYCLES)
        constants[name] = {
            "value": values[name], "error": float(error), "before": prior,
            "told": bool(abs(error) <= TOLD * abs(values[name])),
            "trades_with": [n for n, same in zip(values, alike[k]) if same and n != name],
        }  # fmt: skip
    ratios = dict(zip(problem.rows, (found.predicted / problem.times).tolist()))
    return {
        "generation": problem.core.name,
        "profile": found.variant.profile, "order": found.variant.order,
        "mechanisms": list(found.variant.changed),
        "switches": {name: value_of(found.variant.core, name) for name in SWITCHED},
        "constants": constants, "ratios": ratios,
        "unexplained": [name for name, ratio in ratios.items() if abs(ratio - 1) > OFF],
    }  # fmt: skip
