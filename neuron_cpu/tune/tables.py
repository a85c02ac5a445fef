"""What a search has found, as a table."""

import re
from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from ..core.report.tables import microseconds
from .search import Trial

REASONS = 3  # that are printed, the most frequent ones


def front_table(found: Sequence[Trial], now: Trial, names: Sequence[str], kernel: str) -> Table:
    """The kernel as it is, then the points that none beats in time and SBUF, fastest first."""
    table = Table(title=f"{kernel}: time against SBUF", title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for name in ("µs", "times as fast", "SBUF"):
        table.add_column(name, justify="right")
    _add(table, "as it is", now, now, names)
    for trial in found:
        _add(table, "", trial, now, names)
    return table


def _add(table: Table, label: str, trial: Trial, now: Trial, names: Sequence[str]) -> None:
    values = [str(trial.point[name]) if name in trial.point else "" for name in names]
    if trial.kind != "legal":
        table.add_row(label, *values, trial.kind, "", "")
        return
    ratio = f"{now.time_ns / trial.time_ns:.2f}" if now.kind == "legal" and trial.time_ns else ""
    size = f"{trial.sbuf_bytes / 1024:.4g} KiB"
    table.add_row(label, *values, microseconds(trial.time_ns), ratio, size)


def reasons(trials: Sequence[Trial]) -> list[tuple[str, int]]:
    """The most frequent reasons why points fell away; numbers in them are not told apart."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for trial in trials:
        if trial.refusal:
            kind = re.sub(r"\d+", "#", trial.refusal)
            first.setdefault(kind, trial.refusal)
            counts[kind] += 1
    return [(first[kind], count) for kind, count in counts.most_common(REASONS)]
