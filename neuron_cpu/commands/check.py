"""``check FILE[:KERNEL]``: constructs of a kernel file, and the sources that show them on a device.

With ``--ref FILE:FUNCTION`` or ``--baseline FILE:KERNEL`` the kernel is judged instead (judged.py).
"""

import argparse
from pathlib import Path

from ..console import terminal
from ..errors import UsageError
from . import judged, kernels

# Columns that a narrow terminal does without, the first one first.
EXPENDABLE = ("lines", "first line", "source")
ELSEWHERE = "a wider terminal or --json shows them"
HELP = "judge a kernel by a reference (--ref), or list constructs that no device is known to take"


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kernel", metavar="FILE[:KERNEL]", help="Python file, or one kernel and what it reaches"
    )
    kernels.declare_files(parser, json="write the list, or the figures")
    kernels.declare(parser)
    kernels.declare_time_limit(parser)
    judged.declare(parser)


def run(args: argparse.Namespace) -> int:
    """Judge the kernel, or list the constructs of a file; 1 where something is not as it should."""
    with kernels.bounded(args):
        if judged.asked(args):
            return judged.run(args)
        judged.refuse_alone(args)
        return _list_constructs(args)


def _list_constructs(args: argparse.Namespace) -> int:
    """The constructs of a file by their provenance; 1 where one is unproven."""
    from ..core import current  # noqa: F401 - its functions have rows
    from ..core.check import provenance
    from ..core.report import tables

    is_file = Path(args.kernel).is_file()
    path_text, _, name = (args.kernel, "", "") if is_file else args.kernel.rpartition(":")
    found = _constructs(Path(path_text or args.kernel), name)
    if args.arg:
        if not name:
            raise UsageError(
                f"--arg without a kernel, expected {args.kernel}:KERNEL; add its name."
            )
        found.update(provenance.in_program(kernels.trace(kernels.load_kernel(args.kernel), args)))
    findings = provenance.judge(found)
    console = kernels.output(args)
    terminal.print_table(
        console, tables.provenance_table(findings), EXPENDABLE, "source", ELSEWHERE
    )
    console.print(provenance.summary(findings))
    if not args.arg:
        console.print("Types in PSUM and first partitions: name a kernel and its --arg shapes.")
    kernels.write_json(args, console, [one._asdict() for one in findings], "list")
    counts = provenance.counts(findings)
    return 1 if counts[provenance.UNPROVEN] or counts[provenance.REFUSED] else 0


def _constructs(path: Path, kernel: str) -> dict[str, list[int]]:
    """Constructs in the source of a file, or of one kernel in it."""
    from ..core.check import provenance

    kernels.check_file(path)
    try:
        return provenance.in_source(path.read_text(encoding="utf-8"), kernel or None)
    except (SyntaxError, ValueError, RecursionError) as error:
        said = str(error).replace("<unknown>, ", "")
        raise UsageError(
            f"kernel file {path} is no Python ({said}), expected a Python file; mend it first."
        ) from error
    except LookupError:
        raise UsageError(
            f"{path} has no function '{kernel}', expected one that it defines; correct the name."
        ) from None
