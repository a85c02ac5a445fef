"""Shares of estimates that are near: one vote a time, one vote a kernel, and inside of the band.

A source with fifty sizes of one kernel outvotes ten kernels of others, so every share stands beside
the one in which the sizes of a kernel share its vote.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lab import trust
from neuron_cpu.core.report import bands

if TYPE_CHECKING:
    from .calibrate import Outcome

NEAR = (0.15, 0.25)
BAND = (0.75, 0.85)  # what a band that should hold 80 % may hold
AIMS = {bands.ALL: (0.70, 0.85), "latency": (0.40, 0.60)}  # of kernels' votes, by what binds
PAIRS = 0.97


def by_kernel(outcomes: Iterable[Outcome]) -> dict[tuple[str, str, str], list[Outcome]]:
    """Outcomes that have an estimate, by repository, file and function."""
    found = defaultdict(list)
    for one in outcomes:
        if one.ratio is not None:
            found[one.row.repository, one.row.file, one.row.function].append(one)
    return dict(found)


def near(one: Outcome, far: float) -> bool:
    return one.ratio is not None and abs(one.ratio - 1) <= far


def inside(one: Outcome) -> bool:
    """Whether the measured time lies in the band that a report prints for this estimate."""
    shipped = bands.load()
    band = shipped.get(one.kind, shipped[bands.ALL])
    band = band if band.rows >= bands.FEWEST else shipped[bands.ALL]
    return one.ratio is not None and band.low <= one.ratio <= band.high


def shares(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """Of ±15 %, ±25 % and the band: the share of times and of kernels' votes that are in it."""
    kernels = by_kernel(outcomes)
    done = [one for group in kernels.values() for one in group]
    tests = [lambda one, far=far: near(one, far) for far in NEAR] + [inside]
    return [
        (
            statistics.fmean(map(test, done)),
            statistics.fmean(statistics.fmean(map(test, group)) for group in kernels.values()),
        )
        for test in tests
    ]


def votes_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: shares by what binds the estimate, of times and of kernels."""
    lines = [
        "| Bound by | times | kernels | ±15 %: times | kernels | ±25 %: times | kernels | in the "
        "band: times | kernels |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in (bands.ALL, *bands.CLASSES):
        some = [o for o in outcomes if o.ratio is not None and kind in (bands.ALL, o.kind)]
        if some:
            told = " | ".join(f"{share:.0%}" for pair in shares(some) for share in pair)
            lines.append(f"| {kind} | {len(some)} | {len(by_kernel(some))} | {told} |")
    return "\n".join(lines)


def aims_list(outcomes: Sequence[Outcome], ordered: tuple[int, int]) -> str:
    """Markdown: each aim, what the kernels' votes have, and whether it is met.

    Args:
        ordered: pairs in the right order, and all pairs.
    """
    lines = ["| Aim | aimed at | found | met |", "|---|---:|---:|---|"]
    for kind, aims in AIMS.items():
        some = [o for o in outcomes if o.ratio is not None and kind in (bands.ALL, o.kind)]
        for far, aim, (_, found) in zip(NEAR, aims, shares(some) if some else []):
            met = "yes" if found >= aim else "no"
            told = f"{kind}: kernels within ±{far:.0%}"
            lines.append(f"| {told} | {aim:.0%} | {found:.0%} | {met} |")
    right, every = ordered
    if every:
        met = "yes" if right / every >= PAIRS else "no"
        lines.append(f"| pairs in order | {PAIRS:.0%} | {right / every:.0%} | {met} |")
    held = shares(outcomes)[2][0]
    met = "yes" if BAND[0] <= held <= BAND[1] else "no: the next bands come from this set too"
    lines.append(f"| times in the band | {BAND[0]:.0%} to {BAND[1]:.0%} | {held:.0%} | {met} |")
    return "\n".join(lines)


def left_out(outcomes: Sequence[Outcome]) -> str:
    """Markdown: every source priced with what the other sources say, and the mean over sources.

    The others' ratios give the median by which an estimate of its class is divided, and a band.
    """
    lines = [
        "| Source left out | times | mean error | divided by the others' medians | in the "
        "others' band |",
        "|---|---:|---:|---:|---:|",
    ]
    sources = defaultdict(list)
    for one in outcomes:
        if one.ratio is not None:
            sources[one.row.repository].append(one)
    told = {name: _without(some, name, sources) for name, some in sources.items()}
    for name, figures in sorted(told.items()):
        cells = " | ".join(f"{share:.0%}" for share in figures)
        lines.append(f"| {name} | {len(sources[name])} | {cells} |")
    for name, of in (("mean", statistics.fmean), ("median", statistics.median)):
        cells = " | ".join(f"{of(column):.0%}" for column in zip(*told.values()))
        lines.append(f"| {name} of the {len(told)} sources | | {cells} |")
    return "\n".join(lines)


def _without(
    some: Sequence[Outcome], name: str, sources: dict[str, list[Outcome]]
) -> tuple[float, float, float]:
    """Mean error of a source's estimates, of those divided by the others' median, and how many the
    others' band holds."""
    others = [one for key, found in sources.items() if key != name for one in found]
    errors, scaled, held = [], [], []
    for one in some:
        known = [o.ratio for o in others if o.kind == one.kind and o.ratio is not None]
        if len(known) < bands.FEWEST:
            known = [o.ratio for o in others if o.ratio is not None]
        low, high = trust.edges(known)
        ratio = one.ratio or 0.0
        errors.append(abs(ratio - 1))
        scaled.append(abs(ratio / statistics.median(known) - 1))
        held.append(low <= ratio <= high)
    return statistics.fmean(errors), statistics.fmean(scaled), statistics.fmean(held)
