"""The findings of a search as a table."""

import re
from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from ..console.terminal import table_of
from ..core.report.tables import microseconds
from .search import Trial

REASONS = 3  # that are printed, the most frequent ones
MOST = 20  # points of a search that are all printed


def point_table(
    found: Sequence[Trial], now: Trial, names: Sequence[str], kernel: str, trials: Sequence[Trial]
) -> Table:
    """The unchanged kernel, then the points that no other beats in time and SBUF, fastest first. A
    small table has the other points, too."""
    columns = ("", *names, "µs", "times as fast", "SBUF")
    table = table_of("|>".join(columns), f"{kernel}: time against SBUF")
    current = [trial for trial in trials if trial.point == now.point]
    others = [trial for trial in trials if trial not in found and trial not in current]
    if not current or current[0] not in found:
        _add(table, "as it is", now, now, names)
    for trial in found:
        _add(table, "as it is" if trial in current else "front", trial, now, names)
    for trial in sorted(others, key=lambda one: one.time_ns) if len(trials) <= MOST else ():
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
    """The most frequent reasons why points were dropped, and warnings of legal points; numbers in
    them do not distinguish."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for trial in trials:
        warned = (text for case in trial.answer.get("cases", ()) for text in case["warnings"])
        said = trial.refusal or next((f"legal, but warned of: {text}" for text in warned), "")
        if said:
            kind = re.sub(r"\d+", "#", said)
            first.setdefault(kind, said)
            counts[kind] += 1
    return [(first[kind], count) for kind, count in counts.most_common(REASONS)]
