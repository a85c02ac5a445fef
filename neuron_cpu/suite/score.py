"""Outcomes of the suite as a table, and their score: how many are right, and how much faster."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ..console.terminal import table_of
from ..core.report.tables import microseconds
from .strangers import CORRECT, MISSING, Outcome

FASTER = (1.0, 2.0, 4.0)  # KernelBench's fast_p: right, and more than p times as fast
EXPENDABLE = ("roofline", "on a device, µs", "largest error", "level")


def share(outcomes: Sequence[Outcome], factor: float) -> float:
    """Share of the operators that are right and more than `factor` times as fast as naive."""
    return sum(one.speedup > factor for one in outcomes) / len(outcomes) if outcomes else 0.0


def score(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Correct share and fast_1, fast_2, fast_4 of all operators, and of each level."""
    found: dict[str, Any] = {}
    levels = sorted({one.level for one in outcomes})
    for name, level in (("all", None), *((f"level {n}", n) for n in levels)):
        chosen = [one for one in outcomes if level in (None, one.level)]
        right = sum(one.correct for one in chosen) / len(chosen) if chosen else 0.0
        found[name] = {"operators": len(chosen), "correct": right}
        found[name] |= {f"fast_{factor:g}": share(chosen, factor) for factor in FASTER}
    return found


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """One row an operator."""
    table = table_of(
        "operator|>level|verdict|>largest error|>µs|>on a device, µs|>naive µs|>times as fast|"
        ">roofline",
        "answers to the suite",
    )
    for one in outcomes:
        errors = [float(e["error"]) for case in one.cases for e in case.get("errors", ())]
        time, band, speedup, share_of_bound = "", "", "", ""
        if one.estimate is not None:
            time, *ends = (
                microseconds(1e3 * us) for us in (one.estimate["time_us"], *one.estimate["band_us"])
            )
            band, speedup = " to ".join(ends), f"{one.speedup:.2f}"
            share_of_bound = f"{one.estimate['of_bound_percent']:.0f} %"
        largest, naive = f"{max(errors):.2g}" if errors else "", microseconds(one.naive_ns)
        head = one.operator, str(one.level), one.word, largest
        table.add_row(*head, time, band, naive, speedup, share_of_bound)
    return table


def score_table(found: dict[str, Any]) -> Table:
    """Shares of all operators and of each level."""
    names = ("correct", *(f"fast_{factor:g}" for factor in FASTER))
    heads = "|".join(f">over {factor:g} x" for factor in FASTER)
    title = "score: share of the operators, right and so fast"
    table = table_of(f"|>operators|>correct|{heads}", title)
    for group, shares in found.items():
        table.add_row(group, str(shares["operators"]), *(f"{shares[n]:.0%}" for n in names))
    return table


def reasons(outcomes: Sequence[Outcome]) -> list[str]:
    """Why answers failed, were refused or are wrong."""
    return [
        f"{one.operator}: {one.sentence}" for one in outcomes if one.word not in (CORRECT, MISSING)
    ]
