"""Measured against predicted: published device times and what the cost model says.

    python benchmarks/calibrate.py --public DIR [--data FILE] [--rows WORD ...] [--write]
    python benchmarks/calibrate.py --public DIR --rows WORD ... --verify | --vary

The public kernels of calibration.json (or FILE, of its form) run in their own source, from
checkouts ``DIR/OWNER/NAME@COMMIT`` (or ``DIR/OWNER/NAME``); ``--write`` replaces their table in
docs/calibration.md and the bands that estimates carry. ``--verify`` fails where an estimate is no
longer the page's. ``--vary`` shows what each constant of the model would change if it were 20 %
off; it takes fitted rows only. Rows of the sealed set are written once, with the commit, and never
again.
"""

import argparse
import functools
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

if __name__ in ("__main__", "__mp_main__"):  # pages are written whole
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from neuron_cpu import ensure_sdk  # noqa: E402 - after the path

ensure_sdk()
import calibration_rows as public_rows  # noqa: E402 - needs the SDK names
import pages  # noqa: E402

from neuron_cpu.core import NkiError  # noqa: E402
from neuron_cpu.core.device import spec, target  # noqa: E402
from neuron_cpu.core.report import bands, report  # noqa: E402
from neuron_cpu.core.time import cost, schedule  # noqa: E402
from neuron_cpu.core.time.passes import join, keep  # noqa: E402
from neuron_cpu.files import write_text_atomically  # noqa: E402

LIMIT = 0.15
APART_SETS = (public_rows.OPENED, public_rows.SEALED)  # each has a file and a block of its own
APART = 1.05  # measured times of two variants that differ by less have no order
OUTLIER = (0.6, 1.7)
SIDES = ("hbm_read", "hbm_written")
GEN2_CHIPS = ("", "trn1", "inf2")
MOVED = 0.01  # a published estimate that moves by more has to be made anew
SCALE = (0.8, 1.2)  # of a constant that is varied
VARIED = (
    "tensor_pace", "engine_start_cycles", "min_ii", "dependent_cycles", "dma.start_ns",
    "dma.bytes_per_ns", "dma.flat_bytes_per_ns", "dma.row_2_24_ns", "dma.part_word_ns",
    "dma.lone_row_ns", "dma.issue_ns", "dma.issue_row_ns", "dma.one_index_ns", "GRAPH_START_NS",
    "clock_hz", "half_rows_pace", "ramp_ns", "hbm_bytes_per_ns", "dma.descriptor_ns", "dma.row_ns",
    "dma.transposed", "dma.transposed_on_chip", "dma.today_bytes_per_ns", "dma.flat_row_bytes",
    "dma.flat_row_most_bytes", "keep.LEFT", "schedule.WINDOW", "join.JOINED", "join.UNROLLED",
)  # fmt: skip
MODULES = {"keep": keep, "schedule": schedule, "join": join}
HEAD = ("git", "rev-parse", "--short", "HEAD")
DOCUMENT = ROOT / "docs" / "calibration.md"
PLACE = re.compile(r"[^/\s:()]+\.py:\d+")  # what a table keeps of the line that a refusal names
UNMET = re.compile(r"^\| [\w.-]+ \| sealed \|.*\| ([\d.]+) \| (\w+)[^|]*\| [^|]+ \|$", re.M)
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
    estimated_us: Optional[float] = None
    kind: str = ""
    busy: str = ""
    problem: str = ""
    missing: bool = False
    engines: dict[str, float] = field(default_factory=dict)
    hbm_mb: tuple[float, ...] = ()

    @property
    def ratio(self) -> Optional[float]:
        return None if self.estimated_us is None else self.estimated_us / self.row.measured_us


def profile_of(sdk: str) -> str:
    """The DMA profile of a release line, the default where there is none."""
    named = [name for name in cost.PROFILES if name.startswith(f"sdk{sdk}")]
    return named[0] if named else cost.DEFAULT_PROFILE


def profile_for(row: public_rows.Row) -> str:
    """The DMA profile that a row is estimated under."""
    return row.profile or profile_of(row.sdk)


def run(row: public_rows.Row, public: Path) -> Outcome:
    """Trace and schedule one public kernel."""
    warnings.simplefilter("ignore")
    try:
        kernel = public_rows.kernel(row, public)
        os.environ[target.ENVIRONMENT_VARIABLE] = row.target or "trn1"
        values = [public_rows.tensor(a) for a in row.arguments]
        program = kernel.trace(*values, **row.keywords)
        found = schedule.schedule(program, profile_for(row))
    except public_rows.Missing as absent:
        return Outcome(row, problem=str(absent), missing=True)
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
        (found.total + spec.GRAPH_START_NS) / 1e3 * row.share,  # of a graph of this kernel
        bands.kind_of(report.profile(found).critical),
        f"{engine.value} {busy[engine] / found.total:.0%}",
        engines={e.value: t / found.total for e, t in busy.items()},
        hbm_mb=tuple(size / 1e6 for size in moved),
    )


def run_all(chosen: Sequence[public_rows.Row], public: Path, jobs: int) -> list[Outcome]:
    """All rows, in processes of their own so that one's memory is gone with the next."""
    outcomes = []
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=8) as pool:
        begin = time.perf_counter()
        for outcome in pool.imap(functools.partial(run, public=public), chosen):
            spent = time.perf_counter() - begin
            said = outcome.problem or f"{outcome.estimated_us:.1f} µs, {outcome.ratio:.2f}"
            print(f"{spent:6.1f} s {outcome.row.id}: {said}", file=sys.stderr, flush=True)
            outcomes.append(outcome)
    return outcomes


def on_page(row: public_rows.Row) -> Outcome:
    """The outcome of a row that is not run again, as the document has it, if it has one."""
    found = re.search(
        rf"^\| {re.escape(row.id)} \|.*\| ([\d.]+) \| [\d.]+ \| (\w+).*? \| (.+?) \|$",
        DOCUMENT.read_text(), re.M,
    )  # fmt: skip
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
            lines.append(f"{start} | | | {reason} |")
            continue
        kind = outcome.kind
        if row.bound and row.bound != kind:
            kind += f" (published: {row.bound})"
        times = f" {outcome.estimated_us:.1f} | {outcome.ratio:.2f} | {kind} | {outcome.busy} |"
        lines.append(start + times)
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
            text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def pairs(outcomes: Sequence[Outcome]) -> list[tuple[str, bool]]:
    """Variants of one group whose measured times differ: the group, and whether the estimates, to
    0.1 µs as on the page, are tied or in the wrong order."""
    done = [o for o in outcomes if o.estimated_us is not None]
    groups: dict[str, list[Outcome]] = {}
    for outcome in done:
        groups.setdefault(outcome.row.group, []).append(outcome)
    found = []
    for name, members in groups.items():
        for pair in combinations(members, 2):
            fast, slow = sorted(pair, key=lambda o: o.row.measured_us)
            if slow.row.measured_us > APART * fast.row.measured_us:
                found.append((name, round(fast.estimated_us, 1) >= round(slow.estimated_us, 1)))
    return found


def summary(outcomes: Sequence[Outcome]) -> str:
    """The figures of some rows in one line of a table."""
    found = [o.ratio for o in outcomes if o.ratio is not None]
    if not found:
        return f"{len(outcomes)} | 0 | | | | | |"
    within = [sum(abs(r - 1) <= far for r in found) / len(found) for far in (LIMIT, 0.25)]
    outside = [o.row.id for o in outcomes if o.ratio and not OUTLIER[0] <= o.ratio <= OUTLIER[1]]
    wrong = [missed for _, missed in pairs(outcomes)]
    error = statistics.fmean(abs(r - 1) for r in found)
    return (
        f"{len(outcomes)} | {len(found)} | {within[0]:.0%} | {within[1]:.0%} | "
        f"{statistics.median(found):.2f} | {error:.0%} | {len(outside)} | "
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
    far = [
        f"{o.row.id} {o.ratio:.2f}"
        for o in outcomes
        if o.ratio and not OUTLIER[0] <= o.ratio <= OUTLIER[1]
    ]
    groups: dict[str, list[bool]] = {}
    for name, missed in pairs(outcomes):
        groups.setdefault(name, []).append(missed)
    told = [f"{name} {sum(found)} of {len(found)}" for name, found in groups.items() if any(found)]
    lines = (
        f"Outside of 0.6 to 1.7: {', '.join(far) or 'none'}.",
        f"Pairs tied or in the wrong order, by group: {', '.join(told) or 'none'}.",
    )
    return "\n\n".join(textwrap.fill(line, 120, break_on_hyphens=False) for line in lines)


def engines_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: published shares of engines' time and bytes of HBM against the estimates'."""
    shares: dict[str, list[float]] = {}
    for outcome in outcomes:
        for engine, share in outcome.row.engines.items() if outcome.engines else ():
            shares.setdefault(engine, []).append(outcome.engines[engine] - share)
    lines = [
        "| Engine | rows | estimated less published share: median | mean distance |",
        "|---|---:|---:|---:|",
    ]
    for engine, apart in shares.items():
        far = statistics.fmean(map(abs, apart))
        lines.append(f"| {engine} | {len(apart)} | {statistics.median(apart):+.0%} | {far:.0%} |")
    lines += ["", "| Bytes of HBM | rows | estimated over published: least | median | most |"]
    lines.append("|---|---:|---:|---:|---:|")
    for side, name in enumerate(("read", "written")):
        ratios = [
            outcome.hbm_mb[side] / outcome.row.hbm_mb[side]
            for outcome in outcomes
            if outcome.hbm_mb and outcome.row.hbm_mb and outcome.row.hbm_mb[side]
        ]
        if ratios:
            told = (f"{of(ratios):.2f}" for of in (min, statistics.median, max))
            lines.append(f"| {name} | {len(ratios)} | {' | '.join(told)} |")
    return "\n".join(lines)


def band_data(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What bands.json holds: percentiles by class of the ratios that the page has of rows when they
    were sealed, and every ratio of today."""
    unmet = [(float(ratio), kind) for ratio, kind in UNMET.findall(DOCUMENT.read_text())]
    members = {bands.ALL: [ratio for ratio, _ in unmet]}
    members |= {k: [r for r, other in unmet if other == k] for k in bands.CLASSES}
    found = {}
    for kind, values in members.items():
        if len(values) > 1:
            tenths = statistics.quantiles(values, n=10, method="inclusive")
            found[kind] = {
                "rows": len(values), "low": round(tenths[0], 3),
                "median": round(statistics.median(values), 3), "high": round(tenths[8], 3),
            }  # fmt: skip
    return {
        "made": "by `make calibrate PUBLIC=DIR` (benchmarks/calibrate.py); do not edit",
        "what": "estimated over measured time of public kernels run in their own source; low and "
        "high are the 10th and 90th percentile of those that the model had not met (sealed), the "
        "class is what bounds the estimate",
        "rows": len(unmet),
        "bands": found,
        "ratios": {o.row.id: round(o.ratio, 3) for o in outcomes if o.ratio is not None},
    }


# --- command --------------------------------------------------------------------------------------
def calibrate_public(args: argparse.Namespace, every: Sequence[public_rows.Row]) -> int:
    """Run the public rows; print and perhaps write their table and bands."""
    chosen = [row for row in every if not args.rows or any(word in row.id for word in args.rows)]
    if args.vary is not None:
        return vary(chosen, args)
    outcomes = run_all(chosen, args.public, args.jobs)
    parts = [summaries(outcomes), named_outliers(outcomes), public_table(outcomes)]
    print("\n\n".join([*parts, engines_table(outcomes)]))
    if args.verify:
        return verify(outcomes)
    if args.write and every[0].set in APART_SETS:
        head = subprocess.run(HEAD, cwd=ROOT, capture_output=True, text=True, check=True)
        once = every[0].set == public_rows.SEALED
        told = (
            f"{'Evaluated once' if once else 'Estimated again'}, at commit {head.stdout.strip()}."
        )
        rest = [*parts[2:], sources_list(every)] if once else [engines_table(outcomes)]
        pages.publish(DOCUMENT, every[0].set, "\n\n".join([told, *parts[:2], *rest]))
    elif args.write:
        if not args.rows and all(o.engines for o in outcomes if o.row.engines):
            pages.publish(DOCUMENT, "engines", engines_table(outcomes))
        by_id = {o.row.id: o for o in outcomes if not o.missing}
        outcomes = [by_id.get(row.id) or on_page(row) for row in every]
        parts = [summaries(outcomes), named_outliers(outcomes), public_table(outcomes)]
        pages.publish(DOCUMENT, "public", "\n\n".join([*parts, sources_list(every)]))
        write_text_atomically(bands.DATA, json.dumps(band_data(outcomes), indent=1) + "\n")
    return 0


def verify(outcomes: Sequence[Outcome]) -> int:
    """1 where an estimate is not the page's any more; rows that the folder lacks are named."""
    shipped = bands.ratios()
    for outcome in outcomes:
        if outcome.missing:
            print(f"not compared: {outcome.problem}", file=sys.stderr)
    moved = [
        f"{o.row.id} {shipped.get(o.row.id)} to {o.ratio if o.ratio is None else round(o.ratio, 3)}"
        for o in outcomes
        if not o.missing and apart(o.ratio, shipped.get(o.row.id))
    ]
    if moved:
        print(f"moved by more than {MOVED:.0%}, make calibrate anew: {', '.join(moved)}")
    return int(bool(moved))


def apart(ratio: Optional[float], shipped: Optional[float]) -> bool:
    """Whether two ratios of one row differ by more than a published one may."""
    if ratio is None or shipped is None:
        return ratio is not shipped
    return abs(ratio - shipped) > MOVED * shipped


def vary(chosen: Sequence[public_rows.Row], args: argparse.Namespace) -> int:
    """Print what every constant changes in the fitted rows if it is 20 % off."""
    names = args.vary or VARIED
    cases = [("none", 1.0), *((name, factor) for name in names for factor in SCALE)]
    one = functools.partial(varied, chosen=chosen, public=args.public)
    head = (
        "| Constant | within ±15 % at -20 % | largest change | within at +20 % | largest change |"
    )
    print(f"{head}\n|---|---:|---|---:|---|")
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        found = pool.imap(one, cases)
        base = next(found)
        for name in names:
            told = [change(next(found), base) for _ in SCALE]
            print(f"| {name} | {' | '.join(told)} |", flush=True)
    return 0


def change(found: Mapping[str, float], base: Mapping[str, float]) -> str:
    """How many ratios are near 1, and which one moved most from `base`."""
    near = sum(abs(ratio - 1) <= LIMIT for ratio in found.values())
    moved, row = max(((found[row] / base[row] - 1, row) for row in found), key=lambda m: abs(m[0]))
    return f"{near} of {len(found)} | " + (f"{moved:+.0%} {row}" if abs(moved) >= 0.005 else "none")


def varied(
    case: tuple[str, float], chosen: Sequence[public_rows.Row], public: Path
) -> dict[str, float]:
    """Ratios of the rows that run with a constant scaled, in a process of its own."""
    if case[1] != 1:
        scale(*case)
    return {o.row.id: o.ratio for o in (run(row, public) for row in chosen) if o.ratio is not None}


def scale(name: str, factor: float) -> None:
    """Multiply a constant of every generation in this process."""
    part, _, field_name = name.rpartition(".")
    module = spec if hasattr(spec, name) else MODULES.get(part)
    if module is not None:
        before = getattr(module, field_name)
        setattr(module, field_name, type(before)(before * factor))
        return
    for chip, core in target.TARGETS.items():
        holder = getattr(core, part) if part else core
        value = getattr(holder, field_name)
        several = isinstance(value, Mapping)
        new = {k: v * factor for k, v in value.items()} if several else value * factor
        made = replace(holder, **{field_name: new})
        target.TARGETS[chip] = replace(core, **{part: made}) if part else made


def refuse_mixing(
    parser: argparse.ArgumentParser, args: argparse.Namespace, every: Sequence[public_rows.Row]
) -> None:
    """Keep the sets apart: constants on fitted rows alone, sealed ones evaluated once, alone."""
    chosen = [row for row in every if not args.rows or any(word in row.id for word in args.rows)]
    others = [row for row in chosen if row.set != public_rows.FITTED]
    if args.vary is not None and others:
        parser.error(
            f"--vary is how constants are chosen and takes fitted rows alone, got {others[0].id} "
            f"({others[0].set}); name fitted rows with --rows"
        )
    sets = {row.set for row in every}
    if len(sets) > 1 and (mixed := sets.intersection(APART_SETS)):
        parser.error(
            f"{args.data} has {min(mixed)} rows beside others; keep them in a file of their own"
        )
    if public_rows.SEALED in sets and not args.write:
        parser.error("sealed rows are evaluated once, with --write, after the constants are frozen")
    if args.write and sets.intersection(APART_SETS):
        if args.rows:
            parser.error(f"--write of the {min(sets)} set needs all of its rows; leave out --rows")
        if public_rows.SEALED in sets and "Evaluated once" in DOCUMENT.read_text():
            parser.error(f"{DOCUMENT.name} has the sealed set's figures, which are made once")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--public", type=Path, metavar="DIR", required=True, help="checkouts of public kernels"
    )
    parser.add_argument("--data", type=Path, default=public_rows.DATA, help="their rows")
    parser.add_argument("--rows", nargs="+", help="only rows whose name has one of the words")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--verify", action="store_true", help=f"fail where a ratio moved by more than {MOVED:.0%}"
    )
    how.add_argument(
        "--vary", nargs="*", help="what these constants, or all, change in fitted rows, 20 %% off"
    )
    parser.add_argument(
        "--write", action="store_true", help="update docs/calibration.md; rows not run stay"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes for the public rows")
    args = parser.parse_args()
    if not args.public.is_dir():
        parser.error(f"{args.public} is no folder; name the one with the checkouts")
    if not args.data.is_file():
        parser.error(f"{args.data} is no file; name one of rows, such as {public_rows.DATA.name}")
    every = public_rows.rows(args.data)
    names = [row.id for row in every]
    if args.rows and not any(word in name for word in args.rows for name in names):
        parser.error(f"no row has {' or '.join(args.rows)} in its name, expected one of {names}")
    refuse_mixing(parser, args, every)
    return calibrate_public(args, every)


if __name__ == "__main__":
    sys.exit(main())
