"""Make neuron_cpu/core/device/evidence.json anew from public kernels that ran on a device.

    python -m lab.provenance_table --public DIR [--write]

DIR holds the checkouts that lab/calibrate.py takes: ``DIR/OWNER/NAME@COMMIT`` or
````DIR/OWNER/NAME``. Rows of calibration.json and calls of provenance_ran.json are traced on the
simulator, the smallest of those that could show something new. *Seen on device* is what stands in
the lines that ran there, and how the recorded instructions use memories, types and partitions. A
kernel that the simulator refuses shows nothing, and is an error. Where a checkout is missing, its
marks stay as they are, and it is named.

Everything else that the stand-in has is *documented*, since its functions and keywords were
written after the vendor's pages; provenance_pages.json says which page describes the other
constructs, and which have none. Without ``--write`` the differences are printed; exit status 1
where there are some, or where a kernel that ran is refused.
"""

import argparse
import ast
import importlib
import inspect
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import EnumMeta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from neuron_cpu import ensure_sdk

ensure_sdk()
import neuronxcc.nki.isa as nisa  # noqa: E402
import neuronxcc.nki.language as nl  # noqa: E402
import nki  # noqa: E402

from lab import DATA, pages  # noqa: E402
from lab import calibration_rows as public_rows  # noqa: E402 - needs the SDK names
from neuron_cpu.core import NkiError  # noqa: E402
from neuron_cpu.core.check import provenance  # noqa: E402
from neuron_cpu.core.device import evidence  # noqa: E402
from neuron_cpu.core.device.evidence import Use  # noqa: E402
from neuron_cpu.core.device.target import ENVIRONMENT_VARIABLE  # noqa: E402

ABOUT = (
    "Constructs of NKI kernels, uses of instructions, and the public sources that show them; "
    "evidence.py says what each part is, lab/provenance_table.py makes this file. Files seen on a "
    "device: those of lab/data/calibration.json, whose times are published, and those of "
    "lab/data/provenance_ran.json, which tells who published their run."
)
# Files in `nki` that ran on a device and are no row of calibration.json.
RAN: dict[str, Any] = json.loads((DATA / "provenance_ran.json").read_text())["ran"]
NO_TIME = "no time of one call"
UNSTATED = "not stated"  # the chip of some times; CONTRIBUTING.md of aws-neuron/nki-samples, whose
SAMPLES = "trn1 or inf2"  # all of them are, asks for an instance of these families
# Pages of the vendor, and which of them describes the forms and the names that are no functions.
PAGES: dict[str, Any] = json.loads((DATA / "provenance_pages.json").read_text())
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
            yield from (f"{name}.{kind.__name__}.{member}" for member in kind.__members__)
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


class Table:
    """The table in the making, beside the one that is shipped."""

    def __init__(self, before: dict[str, Any]) -> None:
        self.before, self.rows = before, documented()
        self.sources: dict[str, list[str]] = {key: [text] for key, text in PAGES["pages"].items()}
        self.uses: Rows = {}
        self.refused: list[str] = []
        self.missing: set[str] = set()  # repositories with their commits that are not there
        self.tried: set[frozenset] = set()  # what traced rows were asked to show

    def add(self, row: public_rows.Row, public: Path) -> None:
        """Enter what a row's kernel executes, where its checkout is there."""
        try:
            if row.kind != NO_TIME and not self._could_show(row, public):
                return
            print(f"traces {row.id}", file=sys.stderr)
            found, uses = traced(row, public)
        except public_rows.Missing:
            self.missing.add(f"{row.repository} {row.commit[:7]}")
            return
        except NkiError as error:
            self.refused.append(f"{row.id}: {error}")
            return
        key = self._key(row, row.file)
        for construct, file in found.items():
            if self.rows.get(construct, [""])[0] != provenance.SEEN:
                self.rows[construct] = [provenance.SEEN, self._key(row, file)]
        for use in uses:
            runs = self.uses.setdefault(" ".join(use), [])
            if row.machine[:4] not in {self.sources[one][1][:4] for one in runs}:
                runs.append(key)

    def _could_show(self, row: public_rows.Row, public: Path) -> bool:
        """Whether a row's text has a construct, or its call a type, that no row has shown yet and
        that none with just these was asked for."""
        text = provenance.in_source(public_rows.source(row, public), row.function or None)
        types = {f"{t.dtype} {row.machine[:4]}" for t in _tensors(row)}
        known = {name for name, (status, _) in self.rows.items() if status == provenance.SEEN}
        asked = frozenset({*text} - known | types)
        new = asked not in self.tried
        self.tried.add(asked)
        return new

    def _key(self, row: public_rows.Row, file: str) -> str:
        """The key of a row's file: its name, with the commit where two have one name."""
        source = [f"{row.repository} {row.commit[:7]}, {file}", row.machine, row.sdk]
        stem = Path(source[0].rpartition("/")[2]).stem
        known = {**self.before["sources"], **self.sources}
        told = next((key for key, one in known.items() if one[0] == source[0]), stem)
        if known.get(told, source)[0] != source[0]:
            told = f"{stem}-{source[0].split(' ')[1][:4]}"
        self.sources[told] = source
        return told

    def keep(self, public: Path) -> None:
        """Let the marks stand that files show which are not there."""
        kept = {
            key: told
            for key, told in self.before["sources"].items()
            for place, _, file in [told[0].partition(", ")]
            if place in self.missing and not (public / place.replace(" ", "@") / file).is_file()
        }
        self.sources |= {key: told for key, told in kept.items() if key not in self.sources}
        for construct, row in self.before["constructs"].items():
            if row[1] in kept and self.rows.get(construct, [""])[0] != provenance.SEEN:
                self.rows[construct] = row
        for use, runs in self.before["uses"].items():
            stay = [key for key in runs if key in kept]
            if stay and use not in self.uses:
                self.uses[use] = stay
        for place in sorted(self.missing):
            print(f"{place} is not there; its rows stay", file=sys.stderr)

    def made(self) -> dict[str, Any]:
        known = provenance.documented()  # which are made anew wherever they are asked for
        used = {key for _, key in self.rows.values()} | {k for r in self.uses.values() for k in r}
        return {
            "about": ABOUT,
            "sources": {key: told for key, told in self.sources.items() if key in used},
            "constructs": {
                name: row for name, row in sorted(self.rows.items()) if known.get(name) != row
            },
            "uses": dict(sorted(self.uses.items())),
        }


def cited() -> list[public_rows.Row]:
    """What ran on a device: the vendor's first, then small calls."""
    every = [
        replace(row, machine=SAMPLES) if row.machine == UNSTATED else row
        for row in (*public_rows.rows(), *ran())
    ]
    return sorted(
        every,
        key=lambda row: ("aws-neuron" not in row.repository, sum(t.numel() for t in _tensors(row))),
    )


def _tensors(row: public_rows.Row) -> list[torch.Tensor]:
    """Tensors among the arguments of a call."""
    given = map(public_rows.tensor, row.arguments)
    return [one for one in given if isinstance(one, torch.Tensor)]


def ran() -> Iterator[public_rows.Row]:
    """The calls of RAN."""
    for place, told in RAN.items():
        repository, commit = place.split(" ")
        for call in told["calls"]:
            yield public_rows.Row(
                id=call["function"],
                source=place,
                repository=repository,
                commit=commit,
                file=call["file"],
                function=call["function"],
                measured_us=math.nan,
                kind=NO_TIME,
                sdk=told["release"],
                set="",
                group="",
                figures=told["shown"],
                machine=told["machine"],
                folders=tuple(call.get("folders", ())),
                arguments=tuple(call["arguments"]),
                keywords=call.get("keywords", {}),
                grid=tuple(call.get("grid", ())),
                target=call.get("target", ""),
                repairs=tuple(map(tuple, call.get("repairs", ()))),
            )


def traced(row: public_rows.Row, public: Path) -> tuple[dict[str, str], set[Use]]:
    """Constructs in the lines that tracing a row's kernel executes, with the files that have them,
    and uses in its Program."""
    os.environ[ENVIRONMENT_VARIABLE] = row.target or "trn1"
    root = str(public_rows.checkout(row, public))
    kernel = public_rows.kernel(row, public)
    keywords = {name: public_rows.tensor(value) for name, value in row.keywords.items()}
    with executed(root) as lines:
        program = kernel.trace(*map(public_rows.tensor, row.arguments), **keywords)
    found: dict[str, str] = {}
    for file, numbers in lines.items():
        text = Path(file).read_text(encoding="utf-8")
        numbers |= _headers(text, numbers)
        own = os.path.relpath(file, root) if file.startswith(root) else row.file
        for construct, places in provenance.in_source(text).items():
            if not numbers.isdisjoint(places):
                found.setdefault(construct, own)
    return found, set(provenance.in_program(program))


@contextmanager
def executed(root: str) -> Iterator[dict[str, set[int]]]:
    """Files below ``root``, and texts made of them, with their lines that run inside the block."""
    lines: dict[str, set[int]] = {}
    roots = root, str(Path(public_rows.scratch().name))

    def within(frame: FrameType, event: str, _: Any) -> Any:
        lines.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return within

    def entered(frame: FrameType, event: str, _: Any) -> Any:
        return within(frame, event, _) if frame.f_code.co_filename.startswith(roots) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield lines
    finally:
        sys.settrace(before)


def _headers(text: str, ran: set[int]) -> set[int]:
    """Lines of decorators and parameters of functions whose body has run."""
    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
    return {
        line
        for one in functions
        for first in [min([one.lineno, *(d.lineno for d in one.decorator_list)])]
        if not ran.isdisjoint(range(one.body[0].lineno, (one.end_lineno or one.lineno) + 1))
        for line in range(first, one.body[0].lineno)
    }


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
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    before = json.loads(evidence.DATA.read_text(encoding="utf-8"))
    table = Table(before)
    for row in cited():
        table.add(row, args.public)
    table.keep(args.public)
    made = table.made()
    for part in ("constructs", "uses"):
        for name in sorted({*made[part], *before[part]}):
            old, new = before[part].get(name), made[part].get(name)
            if old != new:
                print(f"{name}: {old} -> {new}")
    for told in table.refused:
        print(f"ran on a device, and is refused here: {told}")
    if args.write:
        evidence.DATA.write_text(_text(made), encoding="utf-8")
    return 1 if table.refused or (made != before and not args.write) else 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
