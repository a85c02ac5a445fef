"""``profile FILE:KERNEL --arg ...``: the estimated time of one kernel, and its bound."""

import argparse
import json
from typing import Any

from ..console import terminal
from ..console.arguments import positive
from ..files import write_text_atomically
from . import kernels

HELP = "estimate the time of one kernel on Trainium"


ELSEWHERE = "a wider terminal or --json shows them"  # columns that were left out


def declare(parser: argparse.ArgumentParser) -> None:
    kernels.declare_kernel(parser)
    kernels.declare_time_limit(parser)
    parser.add_argument("--dma-profile", help="how DMA is timed (default: the calibrated one)")
    parser.add_argument(
        "--schedule",
        metavar="ORDER",
        help="order within an engine: compiler (list scheduling; the default for neuronxcc.nki) or "
        "program-order (as written; the default for nki)",
    )
    parser.add_argument("--top", type=positive, default=12, help="source lines to print")
    kernels.declare_files(
        parser,
        json="write all figures",
        html="write one page to look at",
        trace="write a trace for ui.perfetto.dev",
    )


def run(args: argparse.Namespace) -> int:
    """Trace, schedule and print; write the files that the command line names."""
    from ..core.report import report, tables
    from ..core.time import cost
    from ..core.time.schedule import check_order, schedules
    from ..judge import chips

    name = args.dma_profile or cost.DEFAULT_PROFILE
    cost.dma_profile(name)
    if args.schedule:
        check_order(args.schedule)
    kernel = kernels.load_kernel(args.kernel)
    program = _program(kernel, args)
    with kernels.bounded(args):
        others = chips.others(kernel, kernels.case_of(args), kernels.parse_grid(args.grid))
    by_profile = schedules(program, (name, *cost.RELEASES), args.schedule)
    found = by_profile[name]
    summary = report.profile(found)
    by_release = {release: by_profile[release].total for release in cost.RELEASES}
    console = kernels.output(args)

    def print_table(table: Any) -> None:
        leave_out = tables.expendable(summary.lines)
        terminal.print_table(console, table, leave_out, "bound by", ELSEWHERE)

    tables.print_profile(console, summary, print_table, args.top)
    if others:
        console.print(chips.sentence(kernel, others))
    for line in tables.other_releases(found.total, by_release):
        console.print(line)
    figures = {"time_ns_by_release": by_release, "chips": others}
    kernels.write_json(args, console, summary.to_json() | figures)
    _write(args, console, found)
    return 0


def _program(kernel: Any, args: argparse.Namespace) -> Any:
    """The program of the kernel, whose values may be undefined: no time depends on them."""
    from ..core.device.errors import only_timed

    with kernels.bounded(args), only_timed():
        return kernels.trace(kernel, args)


def _write(args: argparse.Namespace, console: Any, found: Any) -> None:
    """The trace and the page of a schedule, where the command line asks for them."""
    from ..core.report import report
    from ..page import data
    from ..page.write import write

    label = kernels.label(args.kernel)
    if args.trace:
        write_text_atomically(args.trace, json.dumps(report.perfetto(label, found)))
        console.print(f"trace for ui.perfetto.dev: {args.trace}")
    if args.html:
        write(args.html, label, [data.run(label, found)])
        console.print(f"page: {args.html}")
