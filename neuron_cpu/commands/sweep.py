"""``sweep FILE:KERNEL --arg Nx1024:bf16 --range N=128..4096``: the estimate over sizes."""

import argparse
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.table import Table

from ..console import terminal
from ..errors import UsageError
from . import check, kernels

HELP = "estimate a kernel over a range of sizes: time, bound and share of it"
DOUBLED = re.compile(r"([1-9]\d{0,8})\.\.([1-9]\d{0,8})")


def declare(parser: argparse.ArgumentParser) -> None:
    kernels.declare_kernel(parser)
    kernels.declare_time_limit(parser)
    parser.add_argument(
        "--range",
        required=True,
        metavar="NAME=VALUES",
        help="the size that changes, as --arg names it: N=128..4096 doubles it, N=64..512:64 adds "
        "64, N=100,200 lists",
    )
    kernels.declare_files(parser, json="write all figures")


def run(args: argparse.Namespace) -> int:
    """Trace, time and print every size; 1 where one is illegal."""
    from ..core import NkiError
    from ..judge import cases, chips, verdict

    shapes = (text.partition(":")[0].rpartition("=")[2] for text in args.arg)
    names = [one for shape in shapes for one in re.split("[x${}]+", shape) if one.isidentifier()]
    name, sizes = _sizes(args.range, names)
    kernel, settings = kernels.load_kernel(args.kernel), verdict.Settings()
    grid = kernels.parse_grid(args.grid)
    rows: list[dict[str, Any]] = []
    last = None  # legal size
    with kernels.bounded(args), kernels.told_as_usage(kernel, args.kernel):
        for size in sizes:
            words = [_at(text, name, size) for text in args.arg]
            if words == args.arg:
                raise UsageError(
                    f"--range names {name}, which no --arg has, expected a size of one; write "
                    f"{_named(name, args, names)}."
                )
            case = cases.parse_case(words).resolved(kernels.objects(args.kernel))
            try:
                program = verdict.traced(kernel, case, grid)
            except NkiError as error:
                rows.append({"size": size, "refusal": str(error)})
                continue
            speed = verdict.speed(program, settings)
            bound_ns = speed.time_ns * speed.roofline_percent / 100
            rows.append({"size": size, "bound_ns": bound_ns, **speed._asdict()})
            last = case
        others = chips.others(kernel, last, grid) if last else {}
    console = kernels.output(args)
    terminal.print_table(console, _table(name, rows, args.kernel), ("on a device, µs",), "")
    for reason in dict.fromkeys(row["refusal"] for row in rows if "refusal" in row):
        console.print(reason)
    for line in _jumps(name, rows):
        console.print(line)
    if others:
        console.print(chips.sentence(kernel, others))
    console.print(check.estimate_line(settings))
    kernels.write_json(args, console, {"kernel": args.kernel, name: rows, "chips": others})
    return 1 if any("refusal" in row for row in rows) else 0


def _sizes(text: str, names: Sequence[str]) -> tuple[str, list[int]]:
    """The name and the values of --range; `names` are those that arguments have."""
    from ..tune import space

    doubled = DOUBLED.fullmatch(text.partition("=")[2])
    if doubled is None:
        ((name, values),) = space.parse([text], "--range", [*names, "N"][0]).items()
    else:
        name, first, last = text.partition("=")[0], int(doubled[1]), int(doubled[2])
        values = [first << k for k in range(32) if first << k <= last]
    if not name.isidentifier() or not values or not all(type(v) is int and v > 0 for v in values):
        ends = [max(int(n), 1) for n in re.findall(r"\d+", text)[:2]] or [128, 4096]
        raise UsageError(
            f"--range {text}, expected sizes such as N=128..4096, the least first; write --range "
            f"{name if name.isidentifier() else 'N'}={min(ends)}..{max(ends)}."
        )
    return name, values


def _named(name: str, args: argparse.Namespace, names: Sequence[str]) -> str:
    """What to write where no argument has the name of --range."""
    if names:
        return f"--range {names[0]}={args.range.partition('=')[2]}"
    words = args.arg or ["1024x1024:bf16"]
    size = re.findall(r"\d+", f"{words[0]} 1024")[0]
    return " ".join(f"--arg {re.sub(rf'(?<![0-9]){size}(?=x|:)', name, one)}" for one in words)


def _at(text: str, name: str, size: int) -> str:
    """An argument with its size in the place of the name: Nx1024:bf16, or rows=N."""
    shape, colon, rest = text.partition(":")
    keyword, equals, shape = shape.rpartition("=")
    parts = [str(size) if part.strip("${}") == name else part for part in shape.split("x")]
    return keyword + equals + "x".join(parts) + colon + rest


def _jumps(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """The sizes at which the band is another one than at the size before."""
    return [
        f"From {name}={row['size']} on the bound is {row['bound']}, before it is "
        f"{before['bound']}: the band goes by the bound, so it jumps there, and the time does not."
        for before, row in pairwise([row for row in rows if "bound" in row])
        if row["bound"] != before["bound"]
    ]


def _table(name: str, rows: list[dict[str, Any]], kernel: str) -> Table:
    from ..core.report.tables import microseconds

    columns = f">{name}|>µs|>on a device, µs|>bound, µs|>share|bound by"
    table = terminal.table_of(columns, f"{kernel} over {name}")
    for row in rows:
        if "refusal" in row:
            table.add_row(str(row["size"]), "refused", "", "", "", "")
            continue
        side = "products" if row["roofline_side"] == "compute" else "HBM"
        time, bound = (microseconds(row[key]) for key in ("time_ns", "bound_ns"))
        low, high = map(microseconds, row["band_ns"])
        share = f"{row['roofline_percent']:.0f} %"
        cells = str(row["size"]), time, f"{low} to {high}", f"{bound} {side}", share, row["bound"]
        table.add_row(*cells)
    return table
