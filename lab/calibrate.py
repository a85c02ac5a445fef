"""Measured against predicted: published device times and what the cost model says.

    python -m lab.calibrate --public DIR [--data FILE] [--kept DIR] [--rows WORD ...]
    python -m lab.calibrate --public DIR [--write | --verify] ...

The public kernels of calibration.json (or FILE, of its form) run in their own source, from
checkouts ``DIR/OWNER/NAME@COMMIT`` (or ``DIR/OWNER/NAME``); ``--write`` replaces their table in
lab/docs/calibration.md and the bands of estimates. ``--verify`` fails where an estimate is not the
page's. ``--kept`` names a folder of recorded programs, which gets those that it lacks: other
constants price them without recording. Rows of the sealed set are written once, with the commit,
and never again.
"""

import argparse
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # pages are written whole
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from neuron_cpu import ensure_sdk

ensure_sdk()
from lab import NOTES, ROOT, calibration_votes, pages, trust  # noqa: E402
from lab import calibration_rows as public_rows  # noqa: E402 - needs the SDK names
from neuron_cpu.core import NkiError, Program  # noqa: E402
from neuron_cpu.core.device import spec, target  # noqa: E402
from neuron_cpu.core.device.errors import only_timed  # noqa: E402
from neuron_cpu.core.report import bands, report  # noqa: E402
from neuron_cpu.core.time import cost, schedule  # noqa: E402
from neuron_cpu.files import write_bytes_atomically, write_text_atomically  # noqa: E402
from neuron_cpu.sandbox import records  # noqa: E402

LIMIT = 0.15
APART_SETS = (public_rows.OPENED, public_rows.SEALED)  # each has a file and a block of its own
APART = 1.05  # measured times of two variants that differ by less have no order
OUTLIER = (0.6, 1.7)
SIDES = ("hbm_read", "hbm_written")
GEN2_CHIPS = ("", "trn1", "inf2")
MARK = "not estimated"  # a row whose text the folder lacks
MOVED = 0.01  # a published estimate that moves by more has to be made anew
DOCUMENT, MODEL = NOTES / "calibration.md", NOTES / "cost_model.md"
PLACE = re.compile(r"[^/\s:()]+\.py:\d+")  # what a table keeps of the line that a refusal names
CYCLES = re.compile(r"^def \w*cycles\(.*?(?=^\S)", re.M | re.S)  # of an instruction: no recording's
WIDTH = 120  # of a page's lines
LONGEST_ERROR = 60  # characters of an exception's message in a table


# --- public kernels in their own source -----------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    """What became of one row.

    Attributes:
        estimated_us: None where it did not run.
        kind: class of the estimate (`bands.kind_of`).
        busy: busiest engine and its share.
        problem: why it did not run.
        missing: True where the folder lacks the file.
        engines: share of the time that each engine is busy.
        hbm_mb: megabytes read from and written to HBM.
    """

    row: public_rows.Row
    estimated_us: float | None = None
    kind: str = ""
    busy: str = ""
    problem: str = ""
    missing: bool = False
    engines: dict[str, float] = field(default_factory=dict)
    hbm_mb: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        return None if self.estimated_us is None else self.estimated_us / self.row.measured_us

    @property
    def off(self) -> bool:
        return not OUTLIER[0] <= (self.ratio or 1.0) <= OUTLIER[1]


def profile_for(row: public_rows.Row) -> str:
    """The DMA profile that a row is estimated under: its own, its release's or the default."""
    named = [name for name in cost.PROFILES if name.startswith(f"sdk{row.sdk}")]
    return row.profile or (named[0] if named else cost.DEFAULT_PROFILE)


def recorder() -> str:
    """A digest of the code that records programs; of generations it has the sizes alone."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "neuron_cpu" / "core").rglob("*.py")):
        if not {"time", "report", "spec.py"}.intersection(path.parts[-3:]):
            found.update(CYCLES.sub("", path.read_text()).encode())
    for core in spec.GENERATIONS.values():
        sizes = [v for k, v in vars(core).items() if type(v) is int and "cycles" not in k]
        found.update(repr(sizes).encode())
    return found.hexdigest()[:12]


def recorded(row: public_rows.Row, public: Path, kept: Path | None = None) -> Program:
    """The program of a row, read from `kept` or put there.

    Args:
        kept: a folder of programs that one recorder made, by row and digest of its texts.
    """
    os.environ[target.ENVIRONMENT_VARIABLE] = row.target or "trn1"
    file = kept and kept / f"{row.id}-{public_rows.digest(row, public)}"
    if file and file.is_file():
        importlib.import_module("nki")  # classes of a record are found, not imported
        importlib.import_module("neuronxcc.nki")
        return records.program(records.loaded(zlib.decompress(file.read_bytes())), trusted=True)
    with only_timed():  # devices have timed kernels that store rows that nobody wrote
        program = public_rows.trace(row, public)
    if file:
        write_bytes_atomically(file, zlib.compress(records.dumped({"program": program}), 1))
    return program


def run(row: public_rows.Row, public: Path, kept: Path | None = None) -> Outcome:
    """Trace and schedule one public kernel."""
    warnings.simplefilter("ignore")
    try:
        program = recorded(row, public, kept)
        found = schedule.schedule(program, profile_for(row))
    except public_rows.Missing:
        return Outcome(row, problem=MARK, missing=True)
    except NkiError as refusal:
        place = PLACE.search(str(refusal))
        where = f" at {place[0]}" if place else ""
        return Outcome(row, problem=f"refused{where}: {refusal.identifier}")
    except Exception as error:  # a crash is a result of the comparison too
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        said = str(error).splitlines()[0][:LONGEST_ERROR] if str(error) else ""
        return Outcome(row, problem=f"failed: {type(error).__name__}: {said} ({where})")
    busy = found.engine_busy()
    engine = max(busy, key=lambda e: busy[e])
    moved = [sum(getattr(t, side) for t in found.transfers.values()) for side in SIDES]
    return Outcome(
        row,
        graph_us(row, found.total),
        bands.kind_of(report.profile(found).critical),
        f"{engine.value} {busy[engine] / found.total:.0%}",
        engines={e.value: t / found.total for e, t in busy.items()},
        hbm_mb=tuple(size / 1e6 for size in moved),
    )


def graph_us(row: public_rows.Row, kernel_ns: float) -> float:
    """Microseconds of a graph of the row's kernel alone, as its figure counts them."""
    return (kernel_ns + spec.GRAPH_START_NS) / 1e3 * row.share


def run_all(chosen: Sequence[public_rows.Row], jobs: int, **given: Any) -> list[Outcome]:
    """All rows, in processes whose memory is gone soon; `given` is what `run` takes beside one."""
    outcomes = []
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=8) as pool:
        begin = time.perf_counter()
        for outcome in pool.imap(functools.partial(run, **given), chosen):
            spent = time.perf_counter() - begin
            said = outcome.problem or f"{outcome.estimated_us:.1f} µs, {outcome.ratio:.2f}"
            print(f"{spent:6.1f} s {outcome.row.id}: {said}", file=sys.stderr, flush=True)
            outcomes.append(outcome)
    return outcomes


def on_page(row: public_rows.Row) -> Outcome:
    """The outcome of a row that is not run again, as the document has it, if it has one."""
    found = re.search(
        rf"^\| {re.escape(row.id)} \|.*\| ([\d.]+) \| [\d.]+ \| (\w+).*? \| (.+?) \|$",
        DOCUMENT.read_text(),
        re.M,
    )
    if found is None:
        return Outcome(row, problem="not run since it was entered")
    return Outcome(row, float(found[1]), found[2], found[3])


def public_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: every row with its class, half, times and ratio, or why it has none."""
    lines = [
        "| Kernel | set | measured µs | what was measured | estimated µs | ratio | class | "
        "busiest engine |",
        "|---|---|---:|---|---:|---:|---|---|",
    ]
    for outcome in outcomes:
        row = outcome.row
        start = f"| {row.id} | {row.set} | {row.measured_us:.10g} | {row.kind} |"
        if outcome.estimated_us is None:
            reason = outcome.problem.replace("|", "\\|").replace("\n", " ")
            room = WIDTH - len(f"{start} | | |  |")
            lines.append(f"{start} | | | {textwrap.shorten(reason, room, placeholder=' …')} |")
            continue
        published = f" (published: {row.bound})" if row.bound not in ("", outcome.kind) else ""
        times = f" {outcome.estimated_us:.1f} | {outcome.ratio:.2f} |"
        lines.append(f"{start}{times} {outcome.kind}{published} | {outcome.busy} |")
    return "\n".join(lines)


def sources_list(chosen: Iterable[public_rows.Row]) -> str:
    """Markdown: where each group of rows comes from."""
    first = {row.source: row for row in reversed(list(chosen))}
    lines = []
    for row in reversed(first.values()):
        text = (
            f"- {row.source}: {row.repository} {row.commit[:7]}, {row.file}; "
            f"figures: {row.figures}; machine: {row.machine}; profile {profile_for(row)}"
            f"{row.caveat and '; '}{row.caveat}"
        )
        lines += textwrap.wrap(
            text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def pairs(outcomes: Sequence[Outcome]) -> list[tuple[str, bool]]:
    """Variants of one group whose measured times differ: the group, and whether the estimates, to
    0.1 µs as on the page, are tied or in the wrong order."""
    return [(group, wrong) for group, wrong, _ in compared(outcomes)]


def compared(outcomes: Sequence[Outcome]) -> list[tuple[str, bool, float]]:
    """`pairs`, each with the ratio of its measured times."""
    done = [(o, o.estimated_us) for o in outcomes if o.estimated_us is not None]
    found = []
    for pair in combinations(done, 2):
        (fast, least), (slow, most) = sorted(pair, key=lambda each: each[0].row.measured_us)
        apart = slow.row.measured_us / fast.row.measured_us
        if apart > APART and slow.row.group == fast.row.group:
            wrong = round(least, 1) >= round(most, 1)
            found.append((slow.row.group, wrong, apart))
    return found


def summary(outcomes: Sequence[Outcome]) -> str:
    """The figures of some rows in one line of a table."""
    found = [o.ratio for o in outcomes if o.ratio is not None]
    if not found:
        return f"{len(outcomes)} | 0 | | | | | |"
    within = [sum(abs(r - 1) <= far for r in found) / len(found) for far in (LIMIT, 0.25)]
    wrong = [missed for _, missed in pairs(outcomes)]
    error = statistics.fmean(abs(r - 1) for r in found)
    return (
        f"{len(outcomes)} | {len(found)} | {within[0]:.0%} | {within[1]:.0%} | "
        f"{statistics.median(found):.2f} | {error:.0%} | {sum(o.off for o in outcomes)} | "
        f"{sum(wrong)} of {len(wrong)} |"
    )


def summaries(outcomes: Sequence[Outcome]) -> str:
    """Markdown: the figures of all rows, of each set, generation and class."""
    lines = [
        "| Rows | published | run | within ±15 % | within ±25 % | median ratio | mean error | "
        "off 0.6–1.7 | pairs tied or wrong |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    parts: list[tuple[str, Callable[[Outcome], bool]]] = [
        ("all", lambda o: True),
        *((name, lambda o, name=name: o.row.set == name) for name in public_rows.SETS),
        ("gen2", lambda o: o.row.target in GEN2_CHIPS),
        ("gen3", lambda o: o.row.target == "trn2"),
        ("gen4", lambda o: o.row.target == "trn3"),
        *((f"class {kind}", lambda o, kind=kind: o.kind == kind) for kind in bands.CLASSES),
    ]
    for name, belongs in parts:
        lines.append(f"| {name} | {summary([o for o in outcomes if belongs(o)])}")
    return "\n".join(lines)


def named_outliers(outcomes: Sequence[Outcome]) -> str:
    """The rows outside of 0.6 to 1.7 by name, the pairs in the wrong order by group."""
    far = [f"{o.row.id} {o.ratio:.2f}" for o in outcomes if o.off]
    every = Counter(name for name, _ in pairs(outcomes))
    missed = Counter(name for name, wrong in pairs(outcomes) if wrong)
    told = [f"{name} {count} of {every[name]}" for name, count in missed.items()]
    lines = (
        f"Outside of 0.6 to 1.7: {', '.join(far) or 'none'}.",
        f"Pairs tied or in the wrong order, by group: {', '.join(told) or 'none'}.",
    )
    return "\n\n".join(textwrap.fill(line, WIDTH, break_on_hyphens=False) for line in lines)


def engines_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: published shares of engines' time and bytes of HBM against the estimates'."""
    lines = ["| Engine | rows | estimated less published share: median | mean distance |"]
    lines.append("|---|---:|---:|---:|")
    shown = [o for o in outcomes if o.engines]
    for engine in dict.fromkeys(name for o in shown for name in o.row.engines):
        found = [(o.engines[engine], o.row.engines.get(engine)) for o in shown]
        apart = [ours - theirs for ours, theirs in found if theirs is not None]
        far = statistics.fmean(map(abs, apart))
        lines.append(f"| {engine} | {len(apart)} | {statistics.median(apart):+.0%} | {far:.0%} |")
    lines += ["", "| Bytes of HBM | rows | estimated over published: least | median | most |"]
    lines.append("|---|---:|---:|---:|---:|")
    for side, name in enumerate(("read", "written")):
        ratios = [
            outcome.hbm_mb[side] / moved
            for outcome in outcomes
            if outcome.hbm_mb and (moved := (outcome.row.hbm_mb or (None, None))[side])
        ]
        if ratios:
            told = (f"{of(ratios):.2f}" for of in (min, statistics.median, max))
            lines.append(f"| {name} | {len(ratios)} | {' | '.join(told)} |")
    return "\n".join(lines)


def band_data(outcomes: Sequence[Outcome], commit: str = "") -> dict[str, Any]:
    """What bands.json holds: percentiles by class of the ratios that the page has of rows when they
    were sealed, and the ratio of every row that ran at this commit."""
    members, found = trust.unmet(DOCUMENT), {}
    for kind, values in members.items():
        if len(values) > 1:
            low, high = trust.edges(values)
            found[kind] = {
                "rows": len(values),
                "low": round(low, 3),
                "median": round(statistics.median(values), 3),
                "high": round(high, 3),
            }
    return {
        "made": "by `make calibrate PUBLIC=DIR` (lab/calibrate.py); do not edit",
        "what": "estimated over measured time of public kernels run in their own source; low and "
        "high are the 6th and 94th percentile of those that the model had not met (sealed), the "
        "class is what bounds the estimate",
        "rows": len(members[bands.ALL]),
        "commit": commit,
        "bands": found,
        "ratios": {o.row.id: round(o.ratio, 3) for o in outcomes if o.ratio is not None},
    }


# --- command --------------------------------------------------------------------------------------
def calibrate_public(
    args: argparse.Namespace, every: Sequence[public_rows.Row], chosen: Sequence[public_rows.Row]
) -> int:
    """Run the public rows; print and perhaps write their table and bands."""
    outcomes = run_all(chosen, args.jobs, public=args.public, kept=args.kept)
    parts = [summaries(outcomes), named_outliers(outcomes), public_table(outcomes)]
    print("\n\n".join([*parts, engines_table(outcomes)]))
    if args.verify:
        return verify(outcomes)
    if not args.write:
        return 0
    head = subprocess.getoutput(f"git -C {ROOT} rev-parse --short HEAD")
    if every[0].set in APART_SETS:
        once = every[0].set == public_rows.SEALED
        told = f"{'Evaluated once' if once else 'Estimated again'}, at commit {head}."
        ordered = [not wrong for _, wrong in pairs(outcomes)]
        voted = calibration_votes.votes_table(outcomes) if once else ""
        aimed = calibration_votes.aims_list(outcomes, (sum(ordered), len(ordered))) if once else ""
        told = "\n\n".join(part for part in (told, aimed, voted) if part)
        rest = [*parts[2:], sources_list(every)] if once else [engines_table(outcomes)]
        pages.publish(DOCUMENT, every[0].set, "\n\n".join([told, *parts[:2], *rest]))
        return 0
    lacking = sum(o.missing for o in outcomes)
    told = (
        f"Estimated at commit {head}, by its constants alone; {lacking} of {len(outcomes)} rows "
        f"are {MARK}: their texts are in no checkout, so neither this page nor the bands has a "
        "ratio."
    )
    pages.publish(DOCUMENT, "engines", engines_table(outcomes))
    parts = [textwrap.fill(told, WIDTH), *parts, sources_list(every)]
    pages.publish(DOCUMENT, "public", "\n\n".join(parts))
    write_text_atomically(bands.DATA, json.dumps(band_data(outcomes, head), indent=1) + "\n")
    trust.publish()
    return 0


def verify(outcomes: Sequence[Outcome]) -> int:
    """1 where an estimate is not the page's any more; rows that the folder lacks are named."""
    shipped, moved = bands.ratios(), []
    for one in outcomes:
        if one.missing:
            print(f"not compared: {one.row.id} has no text", file=sys.stderr)
        elif apart(one.ratio, shipped.get(one.row.id)):
            ratio = None if one.ratio is None else round(one.ratio, 3)
            moved.append(f"{one.row.id} {shipped.get(one.row.id)} to {ratio}")
    if moved:
        print(f"moved by more than {MOVED:.0%}, make calibrate anew: {', '.join(moved)}")
    return int(bool(moved))


def apart(ratio: float | None, shipped: float | None) -> bool:
    """Whether two ratios of one row differ by more than a published one may."""
    if ratio is None or shipped is None:
        return ratio is not shipped
    return abs(ratio - shipped) > MOVED * shipped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--public", type=Path, metavar="DIR", required=True, help="checkouts of public kernels")
    option("--kept", type=Path, metavar="DIR", help="recorded programs, kept for later")
    option("--data", type=Path, default=public_rows.DATA, help="their rows")
    option("--rows", nargs="+", help="only rows whose name has one of the words")
    option("--verify", action="store_true", help=f"fail where one moved by more than {MOVED:.0%}%")
    option("--write", action="store_true", help="update the page and the bands, by all rows")
    option("--jobs", type=int, default=2, help="processes for the public rows")
    args = parser.parse_args()
    if not args.public.is_dir():
        parser.error(f"{args.public} is no folder; name the one with the checkouts")
    if not args.data.is_file():
        parser.error(f"{args.data} is no file; name one of rows, such as {public_rows.DATA.name}")
    if args.kept:
        args.kept /= recorder()
        args.kept.mkdir(parents=True, exist_ok=True)
    every = public_rows.rows(args.data)
    chosen = [row for row in every if not args.rows or any(word in row.id for word in args.rows)]
    if not chosen:
        words, names = " or ".join(args.rows), [row.id for row in every]
        parser.error(f"no row has {words} in its name, expected one of {names}")
    if args.write and args.rows:
        parser.error("--write needs all rows, which have one law then; leave out --rows")
    sets = sorted({row.set for row in every})
    for alone in set(APART_SETS).intersection(sets):
        if len(sets) > 1:
            parser.error(f"{args.data} has {alone} rows beside others; give them their own file")
        if alone == public_rows.SEALED and not args.write:
            parser.error("sealed rows are evaluated once, with --write, after constants are frozen")
        if alone == public_rows.SEALED and "Evaluated once" in DOCUMENT.read_text():
            parser.error(f"{DOCUMENT.name} has the sealed set's figures, which are made once")
    return calibrate_public(args, every, chosen)


if __name__ == "__main__":
    sys.exit(pages.written(main))
