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

from tests.real import alone, releases  # noqa: E402

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
    """What this very tree has found, in cells that came to their end."""
    return _cells(name, _state().__eq__, alone.CUT)


def _cells(name, wanted, cut="\0"):
    found: Table = {}
    for release, row, column, cell, state, _ in _every(name):
        if wanted(state) and not cell.startswith(cut):
            found.setdefault(release, {}).setdefault(row, {})[column] = cell
    return found


def _every(name):
    """Release, row, column, cell, state of the tree, processor seconds."""
    for release, rows in _read(name)["timed"].items():
        for row, cells in rows.items():
            for column, cell in cells.items():
                yield release, row, column, *cell


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
        return {"rows": [], "timed": {}}
    content: dict[str, Any] = {"timed": {}} | json.loads(path.read_text(encoding="utf-8"))
    return content


def _write(name, content):
    _file(name).parent.mkdir(parents=True, exist_ok=True)
    _file(name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def keep_rows(name, rows):
    """The rows of a table, in their order."""
    _write(name, _read(name) | {"rows": list(rows)})


def keep(name, release, row, column, cell, seconds):
    """A cell of a table, and the processor seconds that it took."""
    content = _read(name)
    cells = content["timed"].setdefault(release, {}).setdefault(row, {})
    cells[column] = cell, _state(), seconds
    _write(name, content)
    print(f"{release} {row}, {column}: {cell} ({seconds} s)", file=sys.stderr, flush=True)


def end(name, writes):
    """The end of a run: what its cells took, and the table where it is asked for."""
    took = [seconds for *_, state, seconds in _every(name) if state == _state()]
    print(f"{name}: {len(took)} cells, {sum(took):.0f} processor seconds", file=sys.stderr)
    if writes:
        write(name)


def write(name):
    """Bring a table into the page, release by release. A release of which the page tells more than
    is kept here stays as it stands."""
    known, rows = kept(name), _read(name)["rows"]
    parts, before = [], _parts(name)
    for release in releases.RELEASES:
        found = {row: known[release][row] for row in rows if row in known.get(release, {})}
        made = (
            _triangle(release, found) if name == CROSSES else _grid(release, found, COLUMNS[name])
        )
        old = before.get(release, "")
        if _told(made) < _told(old):
            less = (
                f"{name} of {release}: {_told(made)} cells are known here, {_told(old)} on the page"
            )
            print(f"{less}, which stays; run the others, or take it out there", file=sys.stderr)
            made = old
        parts += [made] * bool(_told(made))
    put(name, "\n\n".join(parts))


def _parts(name):
    """What the page says of each release."""
    text = PAGE.read_text(encoding="utf-8")
    _, _, text = text.partition(f"<!-- table of {name} -->")
    text, _, _ = text.partition(f"<!-- end of {name} -->")
    parts = re.split(r"^(?=NxD Inference )", text, flags=re.MULTILINE)[1:]
    return {part.split()[2].rstrip(":"): part.strip() for part in parts}


def _told(part):
    """How many cells, or pairs, a release's table has."""
    counted = re.search(r" of (\d+) pairs", part)
    grid = re.findall(r"^\| [^|\n]+ \|(.*)\|$", part, re.MULTILINE)
    cells = [cell.strip() for row in grid for cell in row.split("|")]
    return int(counted[1]) if counted else len(cells) - cells.count("-")


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


def _grid(release, rows, columns):
    """A release's table, and below it what was raised."""
    lines = [f"NxD Inference {release}:", "", "| | " + " | ".join(columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    notes: list[str] = []
    for row, cells in rows.items():
        shown = [_marked(cells.get(column, "-"), notes) for column in columns]
        lines.append(f"| {row} | " + " | ".join(shown) + " |")
    for number, note in enumerate(notes, 1):
        lines += ["", *textwrap.wrap(f"({number}) {note}", 120, break_on_hyphens=False)]
    return "\n".join(lines)


# The largest error of a cell that is right: bytes for weights or caches, kernels in bf16, fp32.
NARROW, LIMITS = 0.2, {"fp32": 1e-4, "kernels": 5e-2, "library": 1e-4}


def verdict(row, cells):
    """What a pair of features does, in a word, or a note that says why there is no figure;
    "-" where a column has not been run."""
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


def _triangle(release, rows):
    """A release's pairs that are not simply right, by what they end in."""
    found: dict[str, list[str]] = {}
    for row, cells in rows.items():
        found.setdefault(verdict(row, cells), []).append(row.replace(", ", " × "))
    found.pop("-", None)
    every = sum(map(len, found.values()))
    right = len(found.pop("right", []))
    lines = [f"NxD Inference {release}: {right} of {every} pairs are right.", ""]
    for note, pairs in sorted(found.items()):
        told = f"- {note}: {'; '.join(pairs)}"
        lines.append(textwrap.fill(told, 118, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines).strip()


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
