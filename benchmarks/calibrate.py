"""Measured against predicted: published device times and what the cost model says.

    python benchmarks/calibrate.py [--public DIR] [--rows WORD ...] [--write] [--jobs N]

With ``--public DIR`` the public kernels of calibration.json run in their own source, from checkouts
``DIR/OWNER/NAME@COMMIT`` (or ``DIR/OWNER/NAME``); ``--write`` then replaces their table in
docs/cost_model.md and the bands that estimates carry. Without it the kernels of
calibration_kernels.py, written anew after the same workloads, run and stand beside the shipped
ratios of the originals; exit status 1 where a device time is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import re
import statistics
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402 - after the path

from neuron_cpu import ensure_sdk  # noqa: E402

ensure_sdk()
import calibration_kernels as kernels  # noqa: E402 - needs the SDK names
import calibration_rows as public_rows  # noqa: E402

from neuron_cpu.core import NkiError  # noqa: E402
from neuron_cpu.core.device import spec, target  # noqa: E402
from neuron_cpu.core.report import bands, report  # noqa: E402
from neuron_cpu.core.time import cost, schedule  # noqa: E402

LIMIT = 0.15
APART = 1.05  # measured times of two variants that differ by less have no order
OUTLIER = (0.6, 1.7)
DOCUMENT = ROOT / "docs" / "cost_model.md"
PLACE = re.compile(r"[^/\s:()]+\.py:\d+")  # what a table keeps of the line that a refusal names
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
        instructions: length of the program.
    """

    row: public_rows.Row
    estimated_us: Optional[float] = None
    kind: str = ""
    busy: str = ""
    problem: str = ""
    missing: bool = False
    instructions: int = 0

    @property
    def ratio(self) -> Optional[float]:
        done = self.estimated_us is not None
        return self.estimated_us / self.row.measured_us if done else None


def profile_of(sdk: str) -> str:
    """The DMA profile of a release line, the default where there is none."""
    named = [name for name in cost.PROFILES if name.startswith(f"sdk{sdk}")]
    return named[0] if named else cost.DEFAULT_PROFILE


def run(row: public_rows.Row, public: Path) -> Outcome:
    """Trace and schedule one public kernel."""
    warnings.simplefilter("ignore")
    try:
        kernel = public_rows.kernel(row, public)
        if row.target:  # asked for by no kernel of the other language; the process is the row's
            os.environ[target.ENVIRONMENT_VARIABLE] = row.target
        values = [public_rows.tensor(a) for a in row.arguments]
        program = kernel.trace(*values, **row.keywords)
        found = schedule.schedule(program, profile_of(row.sdk))
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
    return Outcome(
        row,
        predicted_us(found),
        bands.kind_of(report.profile(found).critical),
        f"{engine.value} {busy[engine] / found.total:.0%}",
        instructions=len(program.instructions),
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
    """The outcome of a row that is not run again, as the document has it.

    Raises:
        SystemExit: it has none.
    """
    found = re.search(
        rf"^\| {re.escape(row.id)} \|.*\| ([\d.]+) \| [\d.]+ \| (\w+).*? \| (.+?) \|$",
        DOCUMENT.read_text(), re.M,
    )  # fmt: skip
    if found is None:
        raise SystemExit(f"{DOCUMENT} has no estimate of {row.id}, expected one; run it, too")
    return Outcome(row, float(found[1]), found[2], found[3])


def public_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: every row with its class, half, times and ratio, or why it has none."""
    lines = [
        "| Kernel | half | measured µs | what was measured | estimated µs | ratio | class | "
        "busiest engine |",
        "|---|---|---:|---|---:|---:|---|---|",
    ]
    for outcome in outcomes:
        row = outcome.row
        start = f"| {row.id} | {row.half} | {row.measured_us:.10g} | {row.kind} |"
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
            f"figures: {row.figures}; machine: {row.machine}; profile {profile_of(row.sdk)}"
        )
        text += f"; {row.caveat}" if row.caveat else ""
        wrapped = textwrap.wrap(
            text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        lines += wrapped
    return "\n".join(lines)


def pairs(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    """Variants of one group whose measured times differ, the faster first."""
    done = [o for o in outcomes if o.estimated_us is not None]
    groups: dict[str, list[Outcome]] = {}
    for outcome in done:
        groups.setdefault(outcome.row.group, []).append(outcome)
    found = []
    for members in groups.values():
        for pair in combinations(members, 2):
            fast, slow = sorted(pair, key=lambda o: o.row.measured_us)
            if slow.row.measured_us > APART * fast.row.measured_us:
                found.append((fast, slow))
    return found


def summary(outcomes: Sequence[Outcome]) -> str:
    """The figures of some rows in one line of a table."""
    found = [o.ratio for o in outcomes if o.ratio is not None]
    if not found:
        return f"{len(outcomes)} | 0 | | | | |"
    within = [sum(abs(r - 1) <= far for r in found) / len(found) for far in (LIMIT, 0.25)]
    outside = [o.row.id for o in outcomes if o.ratio and not OUTLIER[0] <= o.ratio <= OUTLIER[1]]
    ordered = pairs(outcomes)
    wrong = sum(fast.estimated_us > slow.estimated_us for fast, slow in ordered)
    return (
        f"{len(outcomes)} | {len(found)} | {within[0]:.0%} | {within[1]:.0%} | "
        f"{statistics.median(found):.2f} | {len(outside)} | {wrong} of {len(ordered)} |"
    )


def summaries(outcomes: Sequence[Outcome]) -> str:
    """Markdown: the figures of all rows, of both halves and of each class."""
    lines = [
        "| Rows | published | run | within ±15 % | within ±25 % | median ratio | "
        "outside 0.6 to 1.7 | pairs in the wrong order |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    parts: list[tuple[str, Callable[[Outcome], bool]]] = [
        ("all", lambda o: True),
        ("fitted half", lambda o: o.row.half == "fit"),
        ("other half", lambda o: o.row.half == "check"),
    ]
    for kind in bands.CLASSES:
        parts.append((f"class {kind}", lambda o, kind=kind: o.kind == kind))  # type: ignore[misc]
    for name, belongs in parts:
        lines.append(f"| {name} | {summary([o for o in outcomes if belongs(o)])}")
    return "\n".join(lines)


def named_outliers(outcomes: Sequence[Outcome]) -> str:
    """The rows outside of 0.6 to 1.7 and the pairs in the wrong order, by name."""
    far = [
        f"{o.row.id} {o.ratio:.2f}"
        for o in outcomes
        if o.ratio and not OUTLIER[0] <= o.ratio <= OUTLIER[1]
    ]
    wrong = [
        f"{slow.row.id} before {fast.row.id}"
        for fast, slow in pairs(outcomes)
        if fast.estimated_us > slow.estimated_us
    ]
    lines = (
        f"Outside of 0.6 to 1.7: {', '.join(far) or 'none'}.",
        f"In the wrong order: {', '.join(wrong) or 'none'}.",
    )
    return "\n\n".join(textwrap.fill(line, 120, break_on_hyphens=False) for line in lines)


def band_data(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What bands.json holds: percentiles by class, and every ratio."""
    done = [o for o in outcomes if o.ratio is not None]
    members = {bands.ALL: [o.ratio for o in done]}
    for kind in bands.CLASSES:
        members[kind] = [o.ratio for o in done if o.kind == kind]
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
        "high are the 10th and 90th percentile, the class is what bounds the estimate",
        "rows": len(done),
        "bands": found,
        "ratios": {o.row.id: round(o.ratio, 3) for o in done},
    }


# --- the same workloads, written anew -------------------------------------------------------------
@dataclass(frozen=True)
class Point:
    """One published time of one workload.

    Attributes:
        name: workload.
        kernel: attribute of ``calibration_kernels``.
        arguments: shapes and dtypes.
        measured_us: published microseconds.
        original: row of the shipped table with the same workload in its own source, if any.
        device: False where host transfers are part of the measurement.
        lacks: what the model lacks, for a point that it does not meet.
    """

    name: str
    kernel: str
    arguments: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    measured_us: float
    original: str = ""
    device: bool = True
    lacks: str = ""


Found = Optional[schedule.Schedule]  # None where the kernel is refused


def _matmul(name: str, kernel: str, measured_ms: float, original: str) -> Point:
    shapes = ((8192, 4096), torch.bfloat16), ((8192, 8192), torch.bfloat16)
    return Point(f"matmul 4096x8192x8192, {name}", kernel, shapes, measured_ms * 1e3, original)


def _mamba(version: str, kernel: str, channels: int, length: int, ms: float, lacks="") -> Point:
    big, states = ((channels, length), torch.float32), ((16, length), torch.float32)
    shapes = big, big, ((channels, 16), torch.float32), states, states
    return Point(
        f"Mamba {version}, {channels} ch, {length} tokens",
        kernel,
        shapes,
        ms * 1e3,
        f"mamba-{version}-{channels}x{length}",
        lacks=lacks,
    )


def _layernorm(name: str, kernel: str, measured_us: float) -> Point:
    row = ((1, 1000), torch.float32)
    shapes = ((300, 1000), torch.float32), row, row
    return Point(
        f"LayerNorm 300x1000, {name}",
        kernel,
        shapes,
        measured_us,
        device=False,
        lacks="the measurement contains host transfers",
    )


POINTS = [
    _matmul("tiled", "matmul_tiled", 51.80, "matmul-tiled"),
    _matmul("left operand hoisted", "matmul_hoisted", 42.96, "matmul-hoisted"),
    _matmul("2 x 2 blocks", "matmul_blocked_2x2", 22.07, "matmul-blocked"),
    _matmul("fully blocked", "matmul_blocked_3d", 6.97, "matmul-optimized"),
    _mamba("v1", "mamba_states_outside", 256, 512, 0.17293),
    _mamba("v1", "mamba_states_outside", 4096, 512, 2.34),
    _mamba("v2", "mamba_channels_outside", 4096, 512, 1.61),
    _mamba("v2", "mamba_channels_outside", 4096, 1024, 4.4),
    _mamba("v2", "mamba_channels_outside", 4096, 2048, 8.9),
    _mamba("v2", "mamba_channels_outside", 4096, 4096, 17.6),
    _mamba("v2", "mamba_channels_outside", 4096, 8192, 53.33,
           "the compiler spills"),
    _mamba("v3", "mamba_tiled", 4096, 1024, 3.3),
    _mamba("v3", "mamba_tiled", 4096, 2048, 6.6),
    _mamba("v3", "mamba_tiled", 4096, 4096, 13.3),
    _mamba("v3", "mamba_tiled", 4096, 8192, 27.8),
    _layernorm("nl operations", "layernorm_language", 2311),
    _layernorm("bn_stats", "layernorm_statistics", 1969),
]  # fmt: skip


def predict(point: Point) -> Found:
    """Schedule of one point under the profile of its release, SDK 2.21."""
    arguments = [torch.empty(s, dtype=d, device="meta") for s, d in point.arguments]
    kernel = getattr(kernels, point.kernel)
    try:
        program = kernel.trace(*arguments)
    except NkiError as refusal:
        if refusal.identifier != "sim_sbuf_capacity" or not point.lacks:
            raise
        return None
    kernel.programs.clear()  # the large ones hold 100 000 instructions each
    return schedule.schedule(program, profile_of("2.21"))


def rewritten_table(found: Sequence[tuple[Point, Found]]) -> str:
    """Markdown: measured, predicted and ratio of every point, and the original's ratio."""
    lines = [
        "| Workload | measured µs | estimated µs | ratio | ratio in its own source | "
        "busiest engine | note |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for point, scheduled in found:
        lines.append(f"| {point.name} | {point.measured_us:.1f} | {cells(point, scheduled)}")
    return "\n".join(lines)


def cells(point: Point, found: Found) -> str:
    """The predicted part of a row."""
    own = bands.ratios().get(point.original)
    original = "" if own is None else f"{own:.2f}"
    if found is None:
        return f"refused | | {original} | | {point.lacks} |"
    busy = found.engine_busy()
    engine = max(busy, key=lambda e: busy[e])
    share = busy[engine] / found.total
    return (
        f"{predicted_us(found):.1f} | {ratio(point, found):.2f} | {original} | "
        f"{engine.value} {share:.0%} | {point.lacks} |"
    )


def predicted_us(found: schedule.Schedule) -> float:
    """Microseconds of a graph that consists of this kernel."""
    return (found.total + spec.GRAPH_START_NS) / 1e3


def ratio(point: Point, found: schedule.Schedule) -> float:
    return predicted_us(found) / point.measured_us


# --- command --------------------------------------------------------------------------------------
def write(text: str, block: str) -> None:
    """Replace one block of the document."""
    begin, end = f"<!-- {block}: begin -->", f"<!-- {block}: end -->"
    before = DOCUMENT.read_text()
    after, count = re.subn(
        f"{begin}.*{end}", lambda _: f"{begin}\n{text}\n{end}", before, flags=re.S
    )
    if count != 1:
        raise SystemExit(f"{DOCUMENT} has {count} blocks '{block}', expected 1")
    DOCUMENT.write_text(after)


def calibrate_public(args: argparse.Namespace) -> int:
    """Run the public rows; print and perhaps write their table and bands."""
    chosen = [r for r in public_rows.rows() if not args.rows or any(w in r.id for w in args.rows)]
    outcomes = run_all(chosen, args.public, args.jobs)
    parts = [summaries(outcomes), named_outliers(outcomes), public_table(outcomes)]
    print("\n\n".join(parts))
    if args.write:
        by_id = {o.row.id: o for o in outcomes if not o.missing}
        outcomes = [by_id.get(r.id) or on_page(r) for r in public_rows.rows()]
        parts = [summaries(outcomes), named_outliers(outcomes), public_table(outcomes)]
        write("\n\n".join([*parts, sources_list(public_rows.rows())]), "public")
        bands.DATA.write_text(json.dumps(band_data(outcomes), indent=1) + "\n")
    return 0


def calibrate_rewritten(args: argparse.Namespace) -> int:
    """Run the rewritten kernels; 1 where a device time is off by more than the limit."""
    found = []
    for point in POINTS:
        if args.rows and not any(word in point.name for word in args.rows):
            continue
        begin = time.perf_counter()
        found.append((point, predict(point)))
        spent = time.perf_counter() - begin
        print(f"{point.name}: {spent:.1f} s", file=sys.stderr, flush=True)
    text = rewritten_table(found)
    print(text)
    if args.write:
        write(text, "rewritten")
    off = [
        point.name
        for point, scheduled in found
        if scheduled is not None and point.device and abs(ratio(point, scheduled) - 1) > LIMIT
    ]
    if off:
        print(f"off by more than {LIMIT:.0%}: {'; '.join(off)}")
    return 1 if off else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--public", type=Path, metavar="DIR", help="checkouts of public kernels")
    parser.add_argument("--rows", nargs="+", help="only rows whose name has one of the words")
    parser.add_argument(
        "--write", action="store_true", help="update docs/cost_model.md; rows not run stay"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes for the public rows")
    args = parser.parse_args()
    if args.public is not None and not args.public.is_dir():
        parser.error(f"{args.public} is no folder; name the one with the checkouts")
    names = [p.name for p in POINTS] if args.public is None else [r.id for r in public_rows.rows()]
    if args.rows and not any(word in name for word in args.rows for name in names):
        parser.error(f"no row has {' or '.join(args.rows)} in its name, expected one of {names}")
    if args.public is not None:
        return calibrate_public(args)
    if args.rows and args.write:
        parser.error("--write of the rewritten kernels needs all rows; leave out --rows")
    return calibrate_rewritten(args)


if __name__ == "__main__":
    sys.exit(main())
