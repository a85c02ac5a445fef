"""Verdicts as tables and sentences."""

import math
from collections.abc import Sequence

from rich.table import Table

from ..console import terminal
from ..core.device.refusals import LEGAL
from ..core.report.tables import microseconds
from .lines import Pair
from .references import Reference
from .verdict import Settings, Speed, Verdict

# Columns that a narrow terminal does without, the first one first.
EXPENDABLE = ("MACs", "SBUF", "RMS error", "same type", "bound by", "roofline")


def verdict_table(verdicts: Sequence[Verdict], title: str) -> Table:
    """One row a case: legal, correct, how fast."""
    table = terminal.table_of(
        "~arguments|verdict|>largest error|>same type|>RMS error|>µs|>on a device, µs|bound by|"
        ">roofline|>MACs|>SBUF",
        title,
    )
    for one in verdicts:
        table.add_row(one.case, word(one), *_errors(one), *_speed(one.speed))
    return table


def brief_table(verdicts: Sequence[Verdict]) -> Table:
    """One row a case, in few words: for somebody who learns."""
    table = terminal.table_of("~arguments|verdict|>largest error|>µs")
    for one in verdicts:
        table.add_row(one.case, word(one), _errors(one)[0], _speed(one.speed)[0])
    return table


def word(verdict: Verdict) -> str:
    """The verdict in one word, and whether sources prove that a device takes the kernel."""
    if not verdict.legal:
        return verdict.outcome
    if not verdict.correct:
        return "wrong"
    if not verdict.results:
        return verdict.outcome
    return "correct" if verdict.outcome == LEGAL else f"correct, {verdict.outcome}"


def _errors(verdict: Verdict) -> tuple[str, str, str]:
    """Largest errors of all trials, and of the reference in the kernel's types."""
    if verdict.mismatch or not verdict.results:
        return "", "", ""
    plain = [r.plain.largest for r in verdict.results if r.plain is not None]
    return (
        f"{max(r.accuracy.largest for r in verdict.results):.2g}",
        f"{max(plain):.2g}" if plain else "",
        f"{max(r.accuracy.rms for r in verdict.results):.2g}",
    )


def _speed(speed: Speed | None) -> tuple[str, ...]:
    if speed is None:
        return ("",) * 6
    low, high = map(microseconds, speed.band_ns)
    return (
        microseconds(speed.time_ns),
        f"{low} to {high}",
        speed.bound,
        f"{speed.roofline_percent:.0f} %",
        f"{speed.macs:,}" if speed.macs else "",
        f"{speed.sbuf_bytes / 1024:.0f} KiB",
    )


def title(kernel: str, reference: Reference | None, settings: Settings) -> str:
    """The title of the table: the kernel and its cases."""
    if reference is None:
        return f"{kernel}: traced and timed, not run (no --ref)"
    kinds = list(dict.fromkeys(kind for kind, _ in settings.trials()))
    seeds = ", ".join(map(str, settings.seeds))
    return (
        f"{kernel} against {reference.name} ({reference.library}, float64): values "
        f"{', '.join(kinds)}; seed {seeds}"
    )


def sentences(verdicts: Sequence[Verdict], timed: bool = True) -> list[str]:
    """Sentences below the table: why kernels are illegal or wrong, with places; the bounds of
    `timed` kernels; each warning once, and what is right without it."""
    said = []
    for one in verdicts:
        if one.refusal or one.mismatch:
            fault = one.refusal or one.mismatch
            said += [f"{one.case}: {fault}", *(f"  {place}" for place in one.places)]
        elif not one.correct:
            said += _wrong(one)
        said += [f"{one.case}: {text}" for text in one.types]
        if one.results and all(result.plain is None for result in one.results):
            said.append(
                f"{one.case}: no error in the same type: the reference does not compute in the "
                "types of these arguments"
            )
        if one.speed is not None and timed:
            side = "products" if one.speed.roofline_side == "compute" else "inputs and outputs"
            said.append(
                f"{one.case}: bound by {one.speed.binding}; {side} alone would take "
                f"{one.speed.roofline_percent:.0f} % of the time"
            )
    told: dict[str, list[str]] = {}  # by mend and identifier
    for text in dict.fromkeys(w for one in verdicts for w in one.warnings):
        told.setdefault(text.rpartition("; ")[2], []).append(text)
    for first, *more in told.values():
        places = ", ".join(dict.fromkeys(text.partition(": ")[0] for text in more))
        said.append(f"warning: {first}{' (also at ' * bool(more)}{places}{')' * bool(more)}")
    ways = (one.places for one in verdicts if one.correct and one.places)
    return [*said, *(f"  {line}" for line in next(ways, []))]


def _wrong(verdict: Verdict) -> list[str]:
    result = verdict.worst
    assert result is not None
    found = result.accuracy
    share = f"{found.wrong} of {found.judged} elements"
    finite = math.isfinite(found.largest)
    size = " of their size" * bool(found.bound)  # whole numbers are compared as they are
    most = f"at most by {found.largest:.3g}{size}" if finite else "some are infinite or NaN"
    first = (
        f"{verdict.case}: result {result.number} with {result.kind} values, seed {result.seed}: "
        f"{share} are wrong by more than {found.bound:.2g}, {most}"
    )
    return [first, *(f"  {sentence}" for sentence in verdict.places)]


def line_table(pairs: Sequence[Pair], before: str, after: str) -> Table:
    """Two kernels side by side: lines of equal text share a row."""
    title = f"line by line: {before}, {after} (µs of the critical path)"
    table = terminal.table_of(">line|>before|>after|~source", title)
    for pair in pairs:
        table.add_row(
            pair.place,
            "" if pair.before_ns is None else microseconds(pair.before_ns),
            "" if pair.after_ns is None else microseconds(pair.after_ns),
            f"{pair.sign} {pair.text}",
        )
    return table
