"""``tune FILE:KERNEL --space NAME=VALUES ...``: the parameters that make a kernel fast."""

import argparse
import contextlib
import json
import math
import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from .. import cluster
from ..console import terminal
from ..console.arguments import above_zero, positive, seed
from ..errors import UsageError
from ..files import write_text_atomically
from . import check, kernels

TOLD_SECONDS = 5.0  # between writing points, with a line of progress where there is no terminal
HELP = "search declared parameters of a kernel by the estimate"


def declare(parser: argparse.ArgumentParser) -> None:
    kernels.declare_kernel(parser)
    parser.add_argument(
        "--space",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUES",
        help="keyword argument of the kernel, constant of its file, or module.CONSTANT: "
        "tile=128,256,512 or rows=64..512:64 (default: the file's dict SPACE)",
    )
    kernels.declare_reference(parser, "keep only points that agree with this function")
    parser.add_argument(
        "--case", action="append", default=[], metavar="'ARG ...'", help="one more call; repeat"
    )
    parser.add_argument("--tolerance", type=above_zero, help="largest accepted error of a result")
    parser.add_argument(
        "--values", action="append", metavar="KIND,...", help="values to try; repeat (random,large)"
    )
    parser.add_argument("--points", type=positive, default=200, help="points to try at most (200)")
    parser.add_argument("--jobs", type=positive, help="processes (default: one a processor)")
    parser.add_argument("--scheduler", metavar="ADDRESS", help=cluster.HELP)
    parser.add_argument(
        "--time-limit", type=above_zero, default=120.0, help="seconds for one point (120)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the search")
    kernels.declare_files(parser, json="write all points")


def run(args: argparse.Namespace) -> int:
    """Search, print the front; 1 where no point is legal and right."""
    from ..oracle.serve import Oracle
    from ..tune.search import MEMORY

    with cluster.joined(args.scheduler) as elsewhere:
        jobs = cluster.jobs(args.jobs, elsewhere)
        with contextlib.closing(Oracle(jobs, MEMORY, "--time-limit", elsewhere)) as oracle:
            return _run(args, oracle, jobs)


def _run(args: argparse.Namespace, oracle: Any, jobs: int) -> int:
    from ..tune import search, space

    if not args.ref:
        check.refuse_alone(args, ("values", "tolerance", "ref_library"))
    module = sys.modules[kernels.load_kernel(args.kernel).function.__module__]
    path, _, name = args.kernel.rpartition(":")
    source = space.Source(Path(path), name, module)
    names = space.parse(args.space) if args.space else space.declared(module)
    given = [one.partition("=")[0] for one in args.arg if "=" in one]
    taken = kernels.parameters(args.kernel)
    given += taken[: len(args.arg) - len(given)]
    if twice := [one for one in names if one in given]:
        free = " or ".join(one for one in taken if one not in given) or "a constant of the file"
        raise UsageError(
            f"--space {twice[0]} varies what --arg gives, expected another argument; write {free}."
        )
    point = source.current(names)
    request = _request(args, source.at(point))
    now = search.attempt(oracle, request, point, [(0.0, 0)])  # beaten: not run
    if now.kind == "failed":
        raise UsageError(
            f"{args.kernel} fails unchanged ({now.refusal}), expected a kernel that takes these "
            "arguments; correct --arg or --case."
        )
    console = kernels.output(args)
    total, told = min(args.points, space.size(names)), time.monotonic()

    def done(_: Any) -> None:
        nonlocal told
        legal = [trial.time_ns for trial in work.trials if trial.kind == "legal"]
        best = f"the fastest {min(legal) / 1e3:.2f} µs" if legal else "none legal so far"
        line = f"{len(work.trials)} of {total} points, {best}"
        status.update(line)
        if time.monotonic() - told > TOLD_SECONDS:
            told = time.monotonic()
            _save(args, now, work)
            if not console.is_terminal:
                print(line, file=sys.stderr, flush=True)

    work = search.Search(oracle, request, source, names, args.points, jobs, args.seed, done)
    try:
        with console.status("the first points are traced") as status:
            work.run()
    finally:  # what is known after Ctrl-C is worth having
        found = search.front(work.trials, args.ref is not None)
        _print(console, args, names, now, work, found)
    return 0 if found else 1


def _request(args: argparse.Namespace, code: dict[str, Any]) -> Any:
    """The request for the kernel's `code`."""
    from ..oracle.forms import Bounds, Code, Request, Tolerance
    from ..tune.search import MEMORY

    reference, library = None, args.ref_library
    if args.ref is not None:
        kernels.load_function(args.ref)  # what is wrong with it is said here
        path, _, name = args.ref.rpartition(":")
        reference = Code(name=name, file=str(Path(path).resolve()), library=library)
    seconds = args.time_limit
    args.dtype = []
    return Request(
        schema=1,
        kernel=Code(**code),
        cases=[shlex.join(case.words) for case in check.cases_of(args)],
        reference=reference,
        values=list(check.kinds_of(args.values or ("random", "large"))),
        seeds=[0],
        tolerance=Tolerance(element=args.tolerance),
        target=args.target,
        grid=list(kernels.parse_grid(args.grid)),
        limits=Bounds(seconds=seconds, cpu_seconds=math.ceil(seconds), memory_gib=MEMORY),
    )


def _save(args: argparse.Namespace, now: Any, work: Any) -> None:
    """Keep the points known so far in the file of --json."""
    if args.json not in (None, kernels.STANDARD_OUTPUT):
        write_text_atomically(args.json, json.dumps(_points(args, now, work), default=str))


def _points(args: argparse.Namespace, now: Any, work: Any) -> dict[str, Any]:
    """The points known so far, for --json."""
    from ..tune import search

    return {
        "kernel": args.kernel,
        "now": now.to_json(),
        "front": [one.to_json() for one in search.front(work.trials, args.ref is not None)],
        "trials": [trial.to_json() for trial in work.trials],
    }


def _print(
    console: Any, args: argparse.Namespace, names: dict, now: Any, work: Any, found: list
) -> None:
    """The front, how many points fell away and why, and the files of all of them."""
    from ..judge.verdict import Settings
    from ..tune import tables

    trials = work.trials
    table = tables.point_table(found, now, list(names), args.kernel, trials)
    terminal.print_table(console, table, ("SBUF",), "")
    counts = Counter(trial.kind for trial in trials)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    ran = f"{sum(trial.checked for trial in trials)} were run and are right"
    ran = ran if args.ref else "none was run: no --ref"
    console.print(f"{len(trials)} points tried: {kinds or 'none'}; {ran}.")
    for reason, count in tables.reasons(trials):
        console.print(f"{count} times: {reason}")
    console.print(check.estimate_line(Settings()))
    kernels.write_json(args, console, _points(args, now, work))
