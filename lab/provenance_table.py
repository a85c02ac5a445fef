"""Make neuron_cpu/core/check/provenance.json anew from public kernels that ran on a device.

    python -m lab.provenance_table --public DIR [--trace] [--write]

DIR holds the checkouts that lab/calibrate.py takes: ``DIR/OWNER/NAME@COMMIT`` or
``DIR/OWNER/NAME``. *Seen on device* is what the kernel of a row of calibration.json uses, what a
function of provenance_ran.json uses, and what the contest's winner uses, which has a score
(DIR/thustorage/nki-llama-contest/llama.py). Some constructs show in a traced program only;
``--trace`` traces each row from its shapes (some ten minutes). Without it, and where a file is
missing, the rows that it is credited with stay as they are, and a missing file is named.

Everything else that the stand-in has is *documented*, since its functions and keywords were
written after the vendor's pages; provenance_pages.json says which page describes the other
constructs, and which have none. Without ``--write`` the differences are printed; exit status 1
where there are some.
"""

import argparse
import importlib
import inspect
import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from enum import EnumMeta
from functools import partial
from pathlib import Path
from typing import Any

from neuron_cpu import ensure_sdk

ensure_sdk()
import neuronxcc.nki.isa as nisa  # noqa: E402
import neuronxcc.nki.language as nl  # noqa: E402
import nki  # noqa: E402

from lab import DATA, pages  # noqa: E402
from lab import calibration_rows as public_rows  # noqa: E402 - needs the SDK names
from neuron_cpu.core import NkiError  # noqa: E402
from neuron_cpu.core.check import provenance  # noqa: E402
from neuron_cpu.core.device.target import ENVIRONMENT_VARIABLE  # noqa: E402

ABOUT = (
    "Constructs of NKI kernels and where a public source shows them; provenance.py says what each "
    "status means, lab/provenance_table.py makes this file. Files seen on a device: those "
    "of lab/data/calibration.json, whose times are published, those of "
    "lab/data/provenance_ran.json, which tells who published their run, and the contest's winner."
)
WINNER = "thustorage/nki-llama-contest"
# Files in `nki` that ran on a device and are no row of calibration.json.
RAN: dict[str, Any] = json.loads((DATA / "provenance_ran.json").read_text())["ran"]
NO_TIME = "no time of one call"
# Pages of the vendor, and which of them describes the forms and the names that are no functions.
PAGES: dict[str, Any] = json.loads((DATA / "provenance_pages.json").read_text())
TRACED = ("operand", "result of", "transpose of")  # how forms begin that a Program shows alone
# The stand-in has them under names of other pages, or refuses them.
NO_PAGE = ("nl.gemm_grid", "nl.gemm_stationary_grid", "nl.shared_identity_matrix", "nl.static_cast")
NOT_IN_STUBS = ("bool", "range")  # AWS's library uses them all the same
OWN = "label_all"  # the stand-in's own helper
Rows = dict[str, list[str]]  # construct -> status, source


def documented() -> Rows:
    """What the stand-in's functions take, and the forms and names of the pages."""
    pages_of: dict[str, str] = {}
    for page, module in (("doc-language", nl), ("doc-isa", nisa)):
        for name in _functions("nl" if module is nl else "nisa", vars(module)):
            pages_of[name] = "" if name.split("(")[0] in NO_PAGE else page
    pages_of |= dict.fromkeys(_today(), "doc-current")
    for page, names in PAGES["names"].items():
        pages_of |= dict.fromkeys(names, page)
    pages_of |= PAGES["forms"]
    status = {True: provenance.DOCUMENTED, False: provenance.UNPROVEN}
    return {name: [status[bool(page)], page] for name, page in pages_of.items()}


def _today() -> Iterator[str]:
    """Names of `nki`: functions, their keywords, members of enums, methods of tensors."""
    yield from ("nki.jit", "nki.simulate", "nki.typing.mutable_tensor", "nki.typing.tensor")
    for short, name in provenance.TODAY.items():
        module = importlib.import_module(name)
        offered = {one: getattr(module, one) for one in module.__all__ if one not in NOT_IN_STUBS}
        yield from (f"{name}.{one}" for one in offered)
        yield from _functions(name, offered)
        both = (one for one in offered if f"{short}.{one}" in provenance.OPERATORS)
        yield from (f"{name}.{one}()" for one in both)
        for kind in (value for value in offered.values() if isinstance(value, EnumMeta)):
            yield from (f"{name}.{kind.__name__}.{member.name}" for member in kind)
    methods = {name: made for name, made in vars(nki.language.NkiTensor).items() if callable(made)}
    del methods["check_bounds"]  # the simulator's own
    yield from _functions("nki.language.NkiTensor", methods)
    sizes = (one for one in dir(nki.language.tile_size) if not one.startswith("_"))
    yield from (f"nki.language.tile_size.{one}" for one in sizes)
    yield "nki.isa.NkiInstruction.depends_on"


def _functions(short: str, offered: Mapping[str, Any]) -> list[str]:
    """The public functions of a module or a class and their keywords, as the readers name them."""
    found = []
    for name, value in offered.items():
        function = inspect.isfunction(value) or isinstance(value, partial)
        if function and not name.startswith("_") and name != OWN:
            found.append(f"{short}.{name}")
            for one in inspect.signature(value).parameters.values():
                named = one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
                if named and one.name != "self":
                    found.append(f"{short}.{name}({one.name}=)")
    return found


def seen(public: Path, rows: Rows, sources: dict[str, str], former: Rows, trace: bool) -> None:
    """Enter what files with published times use: the first one is named, the vendor's before all.

    Args:
        rows, sources: what is known so far; both are added to.
        former: rows of the table as it is.
    """

    def enter(constructs: Iterable[str], source: str) -> None:
        for construct in constructs:
            if rows.get(construct, [""])[0] != provenance.SEEN:
                rows[construct] = [provenance.SEEN, source]

    missing = set()
    every = [*public_rows.rows(), *ran()]
    for row in sorted(every, key=lambda one: "aws-neuron" not in one.repository):
        where = f"{row.machine}, SDK {row.sdk}" if row.sdk else row.machine
        place = f"{row.repository} {row.commit[:7]}, {row.file} ({where})"
        stem = Path(row.file).stem
        own = f"{row.repository} {row.commit[:7]}, {row.file}"
        key = next((k for k, text in sources.items() if text.partition(" (")[0] == own), stem)
        if sources.get(key, own).partition(" (")[0] != own:
            key = f"{stem}-{row.commit[:4]}"
        try:
            found = set(provenance.in_source(public_rows.source(row, public), row.function or None))
            found |= _traced(row, public) if trace and row.kind != NO_TIME else set()
            told = RAN.get(row.source, {})
            found = found - {*told.get("branches", [])} | {*told.get("program", [])}
        except public_rows.Missing as error:
            missing.add(place)
            print(f"{row.id}: {error}; its rows stay", file=sys.stderr)
            if key in sources:
                sources[key] = place
            continue
        sources[key] = place
        enter(found, key)
    winner = public / WINNER / "llama.py"
    if winner.is_file():
        enter(provenance.in_source(winner.read_text(encoding="utf-8")), "winner")
    else:
        missing.add(sources["winner"])
        print(f"{winner} is not there; its rows stay", file=sys.stderr)
    for construct, (status, source) in former.items():
        traced = construct.removeprefix("nki.").startswith(TRACED)
        lost = sources.get(source) in missing or (traced and not trace)
        if lost and status == provenance.SEEN:
            enter([construct], source)


def ran() -> Iterator[public_rows.Row]:
    """The functions that ran of the files in RAN."""
    for place, told in RAN.items():
        repository, commit = place.split(" ")
        for file, functions in told["files"].items():
            for function in functions or [""]:
                yield public_rows.Row(
                    f"{file}:{function}", place, repository, commit, file, function,
                    measured_us=math.nan, kind=NO_TIME, sdk=told["release"], set="", group="",
                    figures=told["shown"], machine=told["machine"],
                )  # fmt: skip


def _traced(row: public_rows.Row, public: Path) -> set[str]:
    """Constructs that only the traced Program of a row shows; none where it is refused."""
    os.environ[ENVIRONMENT_VARIABLE] = row.target or "trn1"
    try:
        program = public_rows.trace(row, public)
    except NkiError as error:
        print(f"{row.id} is not traced: {error}", file=sys.stderr)
        return set()
    return set(provenance.in_program(program))


def _text(table: dict[str, Any]) -> str:
    """The table as JSON, a row a line."""
    parts = []
    for name, value in table.items():
        shown = json.dumps(value)
        if isinstance(value, dict):
            rows = (f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in value.items())
            shown = "{\n" + ",\n".join(rows) + "\n }"
        parts.append(f" {json.dumps(name)}: {shown}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--public", type=Path, required=True)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    before = json.loads(provenance.DATA.read_text(encoding="utf-8"))
    known = provenance.documented()  # which are made anew wherever they are asked for
    rows, sources = documented(), {**before["sources"], **PAGES["pages"]}
    seen(args.public, rows, sources, before["constructs"], args.trace)
    used = {source for _, source in rows.values()}
    made = {
        "about": ABOUT,
        "sources": {key: text for key, text in sources.items() if key in used},
        "constructs": {
            name: row for name, row in sorted(rows.items()) if known.get(name) != tuple(row)
        },
    }
    for construct in sorted({*made["constructs"], *before["constructs"]}):
        old, new = before["constructs"].get(construct), made["constructs"].get(construct)
        if old != new:
            print(f"{construct}: {old} -> {new}")
    if args.write:
        provenance.DATA.write_text(_text(made), encoding="utf-8")
    return 0 if made == before or args.write else 1


if __name__ == "__main__":
    sys.exit(pages.written(main))
