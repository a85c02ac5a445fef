"""The constants of the cost model with which it gives the times that a device showed.

Nonlinear least squares on logarithms of times (Levenberg and Marquardt; Nocedal and Wright 2006,
chapter 10). The model runs on numbers that carry their derivatives (Griewank and Walther 2008).
Rows that no constants explain weigh less (Huber 1964), and are named. A switch of the model is
changed where that explains the times that much better. Times bend where one limit takes over from
another, and there scipy's least_squares stops: of played device 1, whose ports are not shared, it
leaves a misfit of 14.1 instead of 10.2 and six constants 5 % off instead of two. Errors are two
standard deviations of the linearised problem, here and at places as likely; where one exceeds TOLD,
the times cannot tell it.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional

import numpy as np

from harness.simulator import COMPILER_ORDER, Engine, NeuronCore, cost
from lab.device import model
from lab.device.plan import of_row
from lab.device.rows import ROWS

STEP = 0.02  # of a logarithm, for derivatives
LATE, WIDE = "ramp_ns", 0.2  # it changes times product by product
TOLD = 0.05  # two standard deviations, relative, of a constant that the times tell
ALIKE = 0.9  # correlation of constants that trade with each other
LOOSE = 1.0  # standard deviation of a logarithm before anything is measured
NOISE, NOISE_US = 0.005, 0.3  # of a time: relative, and what a clock reads
JUMPS = 0.03  # of a time in which TensorE gets warm again and again
HUBER = 3.0
BETTER, EARNED = 0.6, 12.0  # a switch leaves this share of the misfit, and takes off so much
AS_WELL = 4.0  # two standard deviations of a misfit: times do not tell what is no worse
OFF = 0.1  # a row that differs by more is not explained
ITERATIONS, FIRST, QUICK, SWITCHES = 20, 8, 2, 3
NOTABLE = 0.5  # of the rows beyond the constants: a smaller misfit is noise
DAMPING, SETTLED = (0.003, 0.1, 1.0, 10.0), 3e-3  # as little of the misfit is the last step
BENDS = 4
PLACES, FAR = 6, 0.3
RAMPS, SHIFTS = np.linspace(-0.35, 0.35, 24), np.linspace(-1.0, 1.0, 11)
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
    "dma.lone_row_ns", "dma.descriptor_ns", "hbm_bytes_per_ns",
)  # fmt: skip
# of what changes step by step, or is kept beside a transfer: kernels on which it has an influence
BY_STEPS = {
    LATE: ("products", "product_chain"), "dma.descriptor_ns": ("gathers",),
    "dma.one_index_ns": ("gathers",),
}  # fmt: skip
_ROWS = {  # by DMA profile
    "sdk2.25": ("dma.bytes_per_ns", "dma.row_2_24_ns", "dma.part_word_ns"),
    "sdk2.21": ("dma.bytes_per_ns", "dma.flat_bytes_per_ns", "dma.row_ns"),
    "row-rule": ("dma.bytes_per_ns", "dma.short_row_ns", "dma.row_ns"),
}
_ROWS_OF_TODAY = (  # from gen3 on
    "dma.today_bytes_per_ns", "dma.today_row_ns", "dma.bytes_per_ns", "dma.row_ns",
    "dma.part_word_ns", "dma.half_word_ns",
)  # fmt: skip
_ISSUE = ("dma.issue_ns", "dma.issue_row_ns")
SWITCHED = ("exclusive_ports", "dma.fixed_lanes", "dma.today_fixed", "dma.today_issued", *_ISSUE)


@dataclass(frozen=True)
class Variant:
    """One set of mechanisms.

    Attributes:
        core: the generation with its switches.
        today: the kernels are those of `nki`.
        profile: form of short rows; order: of an engine's instructions, None for the usual one.
        changed: names of the switches that differ from the cost model's; before: without the last.
    """

    core: NeuronCore
    today: bool = False
    profile: str = cost.DEFAULT_PROFILE
    order: str | None = None
    changed: tuple[str, ...] = ()
    before: Optional["Variant"] = None

    @property
    def names(self) -> tuple[str, ...]:
        """Constants that times may depend on."""
        dma = self.core.dma
        rows: tuple[str, ...] = _ROWS[self.profile]
        if self.today and dma.today_bytes_per_ns and self.profile == cost.DEFAULT_PROFILE:
            rows = _ROWS_OF_TODAY
        issued = dma.issue_ns and (dma.today_issued or not self.today)
        some = [name for name in (LATE, "dma.one_index_ns") if value_of(self.core, name)]
        some += [f"result_cycles.{e.value}" for e in self.core.result_cycles]
        return (*_CORE, *some, *rows, *(_ISSUE if issued else ()), *model.OVERHEADS)


PROFILES = "sdk2.21", "row-rule"  # of which one holds
MECHANISMS = "ports", "fixed lanes", "issue", "order", *PROFILES


def switched(variant: Variant, name: str) -> Variant:
    """The variant with one mechanism the other way."""
    core, rivals = variant.core, PROFILES if name in PROFILES else ()
    changed = (*(one for one in variant.changed if one not in rivals), name)
    made = replace(variant, changed=changed, before=variant)
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
        return replace(made, core=cost.with_constants(core, switches[name]))
    if name == "order":
        return replace(made, order=COMPILER_ORDER if variant.today else "program-order")
    return replace(made, profile=name)


def value_of(core: NeuronCore, name: str) -> float:
    """A constant as the generation has it."""
    if name in model.OVERHEADS:
        return model.overheads()[name]
    part, _, rest = name.partition(".")
    held = getattr(core, part)
    if part == "dma":
        return getattr(held, rest)
    return held[Engine(rest)] if rest else held


class Dual(float):
    """A number and its derivatives: what the model computes of such numbers has them, too."""

    slope: np.ndarray

    def __new__(cls, value: float, slope: np.ndarray) -> "Dual":
        made = float.__new__(cls, value)
        made.slope = slope
        return made


Slopes = Callable[[float, float], tuple[float, float]]


def _carried(name: str, slopes: Slopes | None = None) -> Any:
    """An operator of Dual; ``slopes`` of its result by both sides' values, None of a sum."""
    plain = getattr(float, name)

    def operate(self: Dual, other: float) -> Dual:
        mine, others = slopes(float(self), float(other)) if slopes else (1.0, 1.0)
        slope = mine * self.slope if slopes else self.slope
        if isinstance(other, Dual):
            slope = slope + (others * other.slope if slopes else other.slope)
        return Dual(plain(self, other), slope)

    return operate


for _name, _slopes in {
    "__add__": None, "__radd__": None, "__sub__": lambda a, b: (1.0, -1.0),
    "__mul__": lambda a, b: (b, a), "__truediv__": lambda a, b: (1 / b, -a / b**2),
    "__rsub__": lambda a, b: (-1.0, 1.0), "__rmul__": lambda a, b: (b, a),
    "__rtruediv__": lambda a, b: (-b / a**2, 1 / a),
}.items():  # fmt: skip
    setattr(Dual, _name, _carried(_name, _slopes))


class Problem:
    """Measured rows, and what a variant says of them under any constants."""

    def __init__(self, measured: Mapping[str, float], today: bool) -> None:
        self.rows, self.today = [name for name in ROWS if name in measured], today
        self.calls = [of_row(ROWS[name], today).call for name in self.rows]
        self.lowered: list[dict[tuple, Any]] = [{} for _ in self.rows]
        self.times = np.array([measured[name] for name in self.rows])
        late = np.array(["burst" in ROWS[name].keywords for name in self.rows])
        self.sigma = np.hypot(np.where(late, JUMPS, NOISE), NOISE_US / self.times)
        self.core = model.program(self.calls[0]).core

    def values(self, variant: Variant, u: np.ndarray) -> dict[str, float]:
        """Constants by name: the cost model's times exp(u), or as many CYCLES where it has 0."""
        found = {}
        for name, one in zip(variant.names, u):
            prior = value_of(variant.core, name)
            found[name] = prior * float(np.exp(one)) if prior else CYCLES * float(one)
        return found

    def predicted(
        self, variant: Variant, values: Mapping[str, float], rows: np.ndarray | None = None
    ) -> list[float]:
        """Microseconds of every row, or of the rows whose numbers are given."""
        costs = {name: values[name] for name in model.OVERHEADS}
        own = {name: value for name, value in values.items() if name not in costs}
        core = cost.with_constants(variant.core, own)
        found = []
        for row in range(len(self.calls)) if rows is None else rows:
            call = self.calls[row]
            model.program(call).core = core
            asked = (call, costs, variant.profile, variant.order, self.lowered[row])
            found.append(model.graph_ns(*asked) / 1e3)
            model.program(call).core = self.core  # whoever asks next is told the model's own
        return found

    def slopes(
        self, variant: Variant, u: np.ndarray, every: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of times [row], and derivatives [row, constant]; by LATE only if asked."""
        values = self.values(variant, u)
        carried = dict(values)
        for k, (name, one) in enumerate(values.items()):
            if name not in BY_STEPS:
                unit = one if value_of(variant.core, name) else CYCLES
                carried[name] = Dual(one, unit * (np.arange(len(u)) == k))
        found = self.predicted(variant, carried)
        at = np.log(np.array(found))
        slopes = np.array([one.slope / one if isinstance(one, Dual) else 0 * u for one in found])
        for name in set(BY_STEPS) & set(values) - (set() if every else {LATE}):
            k, step = variant.names.index(name), WIDE if name == LATE else STEP
            rows = np.flatnonzero([ROWS[row].kernel in BY_STEPS[name] for row in self.rows])
            there = self.values(variant, u + step * (np.arange(len(u)) == k))
            then = np.log(np.array(self.predicted(variant, there, rows)))
            slopes[rows, k] = (then - at[rows]) / step
        return at, slopes

    def solution(self, variant: Variant, u: np.ndarray) -> "Solution":
        """The solution at these constants."""
        at, slopes = self.slopes(variant, u, every=False)
        return Solution(variant, u, self.misfit(u, at), at, slopes)

    def misfit(self, u: np.ndarray, at: np.ndarray) -> float:
        """How far logarithms of times are from the measured ones, and constants from the model's:
        distances count as squares, far ones by their size (Huber)."""
        apart = np.abs(np.log(self.times) - at) / self.sigma
        near = np.minimum(apart, HUBER)
        return float((near * (2 * apart - near)).sum() + (u**2).sum() / LOOSE**2)

    def begun(self, found: "Solution", variant: Variant) -> "Solution":
        """First steps under another variant, from a solution's constants or the cost model's. Its
        own constants begin below those, too: where two limits are equal, no step tells them."""
        known = dict(zip(found.variant.names, found.u))
        starts = [np.zeros(len(variant.names))]
        for own in (0.0, -FAR)[: 1 + bool(set(variant.names) - set(known))]:
            starts.append(np.array([known.get(one, own) for one in variant.names]))
        return min((self.solve(self.solution(variant, u), QUICK) for u in starts), key=_MISFIT)

    def normal(self, at: np.ndarray, slopes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Matrix [constant, constant] and right side of the normal equations."""
        apart = (np.log(self.times) - at) / self.sigma
        weights = np.minimum(1.0, HUBER / np.maximum(np.abs(apart), 1e-9))
        scaled = slopes / self.sigma[:, None]
        matrix = scaled.T @ (weights[:, None] * scaled) + np.eye(slopes.shape[1]) / LOOSE**2
        return matrix, scaled.T @ (weights * apart)

    def freedom(self, variant: Variant) -> int:
        """Rows beyond the constants."""
        return max(1, len(self.rows) - len(variant.names))

    def ramped(self, found: "Solution") -> "Solution":
        """The solution with the best of many ramps of TensorE, to which no step finds a way, at
        constants that the other rows hardly tell from its own: those along the weakest direction
        of the linearised problem. On a Trainium2 that is TensorE's clock with its paces."""
        late = np.array(found.variant.names) == LATE
        if not late.any():
            return found
        rows = np.flatnonzero([ROWS[row].kernel in BY_STEPS[LATE] for row in self.rows])
        weakest = np.linalg.eigh(self.normal(found.at, found.slopes)[0] + np.diag(late * 1e9))[1]
        ways = []
        for shift in SHIFTS:
            u = found.u + shift * weakest[:, 0]
            at = np.log(np.array(self.predicted(found.variant, self.values(found.variant, u))))
            for ramp in RAMPS:
                own = np.where(late, ramp, u)
                values = self.values(found.variant, own)
                at[rows] = np.log(self.predicted(found.variant, values, rows))
                ways.append((self.misfit(own, at), own))
        best = min(ways, key=operator.itemgetter(0))[1]
        return min(found, self.solution(found.variant, best), key=_MISFIT)

    def solve(self, found: "Solution", iterations: int) -> "Solution":
        """Steps that make the misfit smaller. Where the times bend, and none does, slopes are the
        mean of those around (Burke, Lewis and Overton 2005)."""
        source = np.random.default_rng(0)
        for _ in range(iterations):
            enough = (1 - SETTLED) * found.misfit
            taken = self.step(found, found.slopes)
            if taken.misfit > enough and iterations > QUICK:
                ways = source.choice((-STEP, STEP), (BENDS, len(found.u)))
                around = [self.slopes(found.variant, found.u + way, every=False)[1] for way in ways]
                taken = self.step(taken, np.mean([taken.slopes, *around], axis=0))
            found = taken
            if found.misfit > enough:
                break
        return found

    def step(self, found: "Solution", slopes: np.ndarray) -> "Solution":
        """The first of ever shorter steps of Levenberg and Marquardt's that makes the misfit
        smaller, or the solution itself."""
        matrix, right = self.normal(found.at, slopes)
        right = right - found.u / LOOSE**2
        for damping in DAMPING:
            step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), right)
            moved = self.solution(found.variant, found.u + np.clip(step, -0.5, 0.5))
            if moved.misfit < found.misfit:
                return moved
        return found


class Solution(NamedTuple):
    """Constants that fit, their misfit, logarithms of times there and derivatives of those."""

    variant: Variant
    u: np.ndarray
    misfit: float
    at: np.ndarray
    slopes: np.ndarray


def others(variant: Variant) -> list[Variant]:
    """Variants with another mechanism beside those of the variant."""
    return [switched(variant, name) for name in MECHANISMS if name not in variant.changed]


def alike_of(problem: Problem, found: Solution) -> list[str]:
    """Mechanisms that explain the times AS_WELL: beside those that the fit has changed, or in the
    place of the last one."""
    enough, variant, near = found.misfit + AS_WELL, found.variant, set()
    for one in others(variant) + (others(variant.before) if variant.before else []):
        now, gain = problem.begun(found, one), math.inf
        while 0 < now.misfit - enough < 4 * gain:  # else it is there, or will not get there
            gain, now = now.misfit, problem.solve(now, QUICK)
            gain -= now.misfit
        near |= {one.changed[-1]} if now.misfit <= enough else set()
    return [name for name in MECHANISMS if name in near.difference(variant.changed)]


def best_of(problem: Problem) -> Solution:
    """The mechanisms and constants that explain the times; each switch has to earn its place."""
    base = Variant(problem.core, problem.today)
    found = problem.solve(problem.solution(base, np.zeros(len(base.names))), FIRST)
    found = problem.solve(problem.ramped(found), FIRST)
    while found.misfit > NOTABLE * problem.freedom(base) and len(found.variant.changed) < SWITCHES:
        tried = [problem.begun(found, variant) for variant in others(found.variant)]
        while len(tried) > 1:  # the better half goes on
            better = sorted(tried, key=_MISFIT)[: len(tried) // 2]
            tried = [problem.solve(one, QUICK) for one in better]
        best = problem.solve(tried[0], FIRST)
        if best.misfit > min(BETTER * found.misfit, found.misfit - EARNED):
            break
        found = best
    found = problem.solve(problem.ramped(found), ITERATIONS)
    return problem.solve(problem.ramped(found), FIRST)


def errors_of(problem: Problem, found: Solution) -> tuple[np.ndarray, np.ndarray]:
    """Standard deviations of the constants, and their correlations [constant, constant].

    Times bend where one limit takes over from another. So the errors are the largest of those at
    the solution and at PLACES as likely as it.
    """
    scale = max(1.0, found.misfit / problem.freedom(found.variant))
    slopes = problem.slopes(found.variant, found.u)[1]
    covariance = np.linalg.inv(problem.normal(found.at, slopes)[0]) * scale
    source, every = np.random.default_rng(0), [covariance]
    for way in source.multivariate_normal(0 * found.u, covariance, PLACES):
        slopes = problem.slopes(found.variant, found.u + np.clip(2 * way, -FAR, FAR))[1]
        every.append(np.linalg.inv(problem.normal(found.at, slopes)[0]) * scale)
    errors = [np.sqrt(np.diag(one)) for one in every]
    alike = [np.abs(one / np.outer(here, here)) for one, here in zip(every, errors)]
    return np.max(errors, axis=0), np.max(alike, axis=0)


def profile_of(found: Mapping[str, Any], name: str, note: str) -> dict[str, Any]:
    """A fit as the cost model reads it (`cost.MEASURED`), its switches among the constants."""
    values = {constant: one["value"] for constant, one in found["constants"].items()}
    around = {field: values.pop(constant) for constant, field in AROUND.items()}
    del values["GRAPH_START_NS"]  # what `nki.benchmark` adds is no part of a kernel
    return {
        "name": name,
        "note": note,
        "rows": found["profile"],
        "generation": found["generation"],
        "constants": found["switches"] | values,
        "around": around,
    }


def fit(measured: Mapping[str, float], today: bool = False) -> dict[str, Any]:
    """Constants, mechanisms and rows as plain data, of microseconds by row, for the generation in
    force and one of the languages."""
    problem = Problem(measured, today)
    found = best_of(problem)
    values = problem.values(found.variant, found.u)
    errors, alike = errors_of(problem, found)
    constants = {}
    for k, name in enumerate(found.variant.names):
        prior = value_of(problem.core, name)
        error = 2 * errors[k] * (values[name] if value_of(found.variant.core, name) else CYCLES)
        constants[name] = {
            "value": values[name],
            "error": float(error),
            "before": prior,
            "told": bool(abs(error) <= TOLD * abs(values[name])),
            "trades_with": [n for n, same in zip(values, alike[k]) if same > ALIKE and n != name],
        }
    ratios = dict(zip(problem.rows, (np.exp(found.at) / problem.times).tolist()))
    return {
        "generation": problem.core.name,
        "profile": found.variant.profile,
        "order": found.variant.order,
        "mechanisms": list(found.variant.changed),
        "alike": alike_of(problem, found),
        "switches": {name: value_of(found.variant.core, name) for name in SWITCHED},
        "constants": constants,
        "ratios": ratios,
        "unexplained": [name for name, ratio in ratios.items() if abs(ratio - 1) > OFF],
    }
