"""The tables of lab/docs/libraries_results.md, from what the runs beside this file have found.

`python tests/real/page.py` writes them. Every cell is kept in the user's cache as soon as it is
known, with the state of the tree that gave it: a run that was ended goes on with `--resume`, and
one of some rows or releases renews these.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.real import releases  # noqa: E402

PAGE = REPOSITORY / "lab" / "docs" / "libraries_results.md"
FEATURES, MODES, CROSSES, GUIDE = "features", "modes", "crosses", "guide"
COLUMNS = {FEATURES: ("fp32", "bf16", "kernels", "library"), MODES: ("PyTorch", "kernels")}
COLUMNS |= {CROSSES: COLUMNS[FEATURES], GUIDE: ("outcome",)}
Table = dict[str, dict[str, dict[str, str]]]  # release -> row -> column -> what was found


def _file(name):
    return releases.cache("results", f"{name}.json")


def kept(name):
    """What is known so far."""
    return _cells(name, lambda state: True)


def done(name):
    """What this very tree has found."""
    return _cells(name, _state().__eq__)


def _cells(name, wanted):
    found: Table = {}
    for release, rows in _read(name)["found"].items():
        for row, cells in rows.items():
            if own := {column: cell for column, (cell, state) in cells.items() if wanted(state)}:
                found.setdefault(release, {})[row] = own
    return found


@functools.cache
def _state():
    """The commit and what was changed since, but pages, which a run writes."""
    said = b""
    for words in (["rev-parse", "HEAD"], ["diff", "HEAD", "--", ":(exclude)*.md"]):
        git = ["git", "-C", str(REPOSITORY), *words]
        said += subprocess.run(git, check=True, capture_output=True).stdout
    return hashlib.sha256(said).hexdigest()[:12]


def _read(name):
    path = _file(name)
    if not path.is_file():
        return {"rows": [], "found": {}}
    content: dict[str, Any] = {"found": {}} | json.loads(path.read_text(encoding="utf-8"))
    return content


def _write(name, content):
    _file(name).parent.mkdir(parents=True, exist_ok=True)
    _file(name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def keep_rows(name, rows):
    """The rows of a table, in their order."""
    _write(name, _read(name) | {"rows": list(rows)})


def keep(name, release, row, column, cell):
    """A cell of a table."""
    content = _read(name)
    cells = content["found"].setdefault(release, {}).setdefault(row, {})
    cells[column] = cell, _state()
    _write(name, content)
    print(f"{release} {row}, {column}: {cell}", file=sys.stderr, flush=True)


def write(name):
    """Bring a table into the page."""
    known, rows = kept(name), _read(name)["rows"]
    table = {
        release: {row: known[release][row] for row in rows if row in known[release]}
        for release in releases.RELEASES
        if release in known
    }
    put(name, as_triangles(table) if name == CROSSES else as_markdown(table, COLUMNS[name]))


def put(name, shown):
    """Bring a table's text into its place in the page."""
    begin, end = f"<!-- table of {name} -->", f"<!-- end of {name} -->"
    before = PAGE.read_text(encoding="utf-8")
    text = f"{begin}\n\n{shown}\n\n{end}"
    pattern = re.escape(begin) + ".*" + re.escape(end)
    after, count = re.subn(pattern, lambda _: text, before, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} places for {name}, expected one: {begin}")
    PAGE.write_text(after, encoding="utf-8")


def as_markdown(table, columns):
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


# The largest error of a cell that is right: bytes for weights or caches, kernels in bf16, fp32.
NARROW, LIMITS = 0.2, {"fp32": 1e-4, "kernels": 5e-2, "library": 1e-4}


def verdict(row, cells):
    """What a pair of features does, in a word, or a note that says why there is no figure."""
    notes = []
    for column in ("fp32", "kernels"):
        cell = cells.get(column, "-")
        if cell in ("-", "none"):
            return cell
        if ":" in cell:
            notes.append(cell)
        elif float(cell) > (NARROW if re.search("int8|fp8", row) else LIMITS[column]):
            return f"WRONG: {column} {cell}"
    return " / ".join(dict.fromkeys(notes)) or "right"


def as_triangles(table):
    """For each release the pairs that are not simply right, by what they end in."""
    parts = []
    for name, rows in table.items():
        found: dict[str, list[str]] = {}
        for row, cells in rows.items():
            found.setdefault(verdict(row, cells), []).append(row.replace(", ", " × "))
        right = len(found.pop("right", []))
        lines = [f"NxD Inference {name}: {right} of {len(rows)} pairs are right."]
        for note, pairs in sorted(found.items()):
            told = f"- {note}: {'; '.join(pairs)}"
            lines.append(textwrap.fill(told, 118, subsequent_indent="  ", break_on_hyphens=False))
        parts.append("\n".join([lines[0], "", *lines[1:]]))
    return "\n\n".join(parts)


def _marked(cell, notes):
    """A cell's figure, or the number of the note that says why there is none."""
    if ":" not in cell:
        return cell
    if cell not in notes:
        notes.append(cell)
    return f"({notes.index(cell) + 1})"


if __name__ == "__main__":
    for table in COLUMNS:
        write(table)
