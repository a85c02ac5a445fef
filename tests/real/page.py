"""The tables of docs/libraries.md, which the runs beside this file write.

What a run found is kept in the user's cache, so that a run of some rows or releases renews these.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from tests.real import releases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "libraries.md"
Table = dict[str, dict[str, dict[str, str]]]  # release -> row -> column -> what was found


def told(name: str, table: Table, columns: Sequence[str], write: bool) -> None:
    """Print a table; with `write` bring it, and what was found before, into the page."""
    print(as_markdown(table, columns))
    if not write:
        return
    kept = releases.cache("results", f"{name}.json")
    whole: Table = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    for release, rows in table.items():
        for row, cells in rows.items():
            whole.setdefault(release, {}).setdefault(row, {}).update(cells)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(whole, indent=1), encoding="utf-8")
    begin, end = f"<!-- make real: {name} -->", f"<!-- end of {name} -->"
    before = PAGE.read_text(encoding="utf-8")
    text = f"{begin}\n\n{as_markdown(whole, columns)}\n\n{end}"
    pattern = re.escape(begin) + ".*" + re.escape(end)
    after, count = re.subn(pattern, lambda _: text, before, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} places for {name}, expected one: {begin}")
    PAGE.write_text(after, encoding="utf-8")


def as_markdown(table: Table, columns: Sequence[str]) -> str:
    """A table for each release, and below it what was raised."""
    parts = []
    for name, rows in table.items():
        lines = [f"NxD Inference {name}:", "", "| | " + " | ".join(columns) + " |"]
        lines.append("|---" * (len(columns) + 1) + "|")
        notes: list[str] = []
        for row, cells in rows.items():
            shown = [_marked(cells.get(column, "-"), notes) for column in columns]
            lines.append(f"| {row} | " + " | ".join(shown) + " |")
        for number, note in enumerate(notes, 1):
            lines += ["", *textwrap.wrap(f"({number}) {note}", 120, break_on_hyphens=False)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _marked(cell: str, notes: list[str]) -> str:
    """A cell's figure, or the number of the note that says why there is none."""
    if ":" not in cell:
        return cell
    if cell not in notes:
        notes.append(cell)
    return f"({notes.index(cell) + 1})"
