"""``python -m neuron_cpu COMMAND``: time or debug one kernel, or run a script without the SDK.

``profile FILE:KERNEL --arg ...`` traces and verifies the kernel on shapes alone and estimates its
time. ``compare FILE:KERNEL --arg ...`` runs it twice on random inputs and prints the first
instruction whose results part. ``check FILE[:KERNEL]`` lists what a kernel file uses and who has
shown that a device takes it. ``run SCRIPT ARGS...`` runs any script with the stand-in's SDK names
in place.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import ensure_sdk, run_script, terminal
from .arguments import at_least_zero, positive, seed
from .errors import UsageError
from .hints import hint

SHORT_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "f32": "float32",
    "fp32": "float32",
    "i8": "int8",
    "i32": "int32",
    "u8": "uint8",
    "u32": "uint32",
}
INTERRUPTED, READER_GONE = 130, 141  # what a shell reports after Ctrl-C and after `| head`
DIFFERENCE = 0.1  # between SDK releases, from which on both are printed
PIPED_WIDTH = 180  # columns of a table that goes to a file
TENSOR = re.compile(r"(\d+(?:x\d+)*):(\w+)")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m neuron_cpu", description=__doc__.splitlines()[0])
    commands = top.add_subparsers(dest="command", required=True)
    one = commands.add_parser("profile", help="estimate the time of one kernel on Trainium")
    two = commands.add_parser("compare", help="find the first instruction that loses precision")
    commands.add_parser("run", help=f"run a script without the SDK: {run_script.USAGE}")
    three = commands.add_parser("check", help="list constructs that no device is known to take")
    three.add_argument(
        "kernel", metavar="FILE[:KERNEL]", help="Python file, or one kernel and what it reaches"
    )
    three.add_argument("--json", type=Path, metavar="PATH", help="write the list")
    for command in (one, two):
        command.add_argument(
            "kernel", metavar="FILE:KERNEL", help="Python file and kernel function in it"
        )
    for command in (one, two, three):
        command.add_argument(
            "--arg",
            action="append",
            default=[],
            metavar="[NAME=]VALUE",
            help="argument in order: a tensor as 128x512:bf16, or a Python literal; repeat",
        )
        command.add_argument("--grid", help="launch grid, for example 4 or 2x8")
    two.add_argument(
        "--against",
        choices=("shadow", "unmerged"),
        default="shadow",
        help="reference: all float tiles in fp32, or execution without merged loops",
    )
    two.add_argument(
        "--tolerance",
        type=at_least_zero,
        default=0.02,
        help="largest accepted difference, relative to a result's largest magnitude",
    )
    two.add_argument("--seed", type=seed, default=0, help="seed of the random inputs")
    one.add_argument(
        "--dma-profile", default=None, help="DMA profile (default: the calibrated one)"
    )
    one.add_argument(
        "--schedule",
        default="compiler",
        metavar="ORDER",
        help="order within an engine: compiler (list scheduling) or program-order (as written)",
    )
    one.add_argument("--top", type=positive, default=12, help="source lines to print")
    one.add_argument("--json", type=Path, metavar="PATH", help="write all figures")
    one.add_argument("--trace", type=Path, metavar="PATH", help="write a trace for ui.perfetto.dev")
    one.add_argument("--plots", type=Path, metavar="FOLDER", help="write PNG plots")
    return top


# --- arguments ------------------------------------------------------------------------------------
def parse_value(text: str) -> Any:
    """A meta tensor for ``128x512:bf16``, a Python literal otherwise.

    Raises:
        UsageError: it is neither.
    """
    import torch

    match = TENSOR.fullmatch(text)
    if match:
        shape = tuple(int(n) for n in match[1].split("x"))
        name = SHORT_DTYPES.get(match[2], match[2])
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(
                f"--arg {text} names dtype '{match[2]}', expected one such as bf16, float32 or "
                "int32; correct the part after the colon."
            )
        try:
            return torch.empty(shape, dtype=dtype, device="meta")
        except (RuntimeError, TypeError, ValueError):
            raise UsageError(
                f"--arg {text} names no shape that a tensor can have, expected sizes whose product "
                "fits 64 bits; correct the part before the colon."
            ) from None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise UsageError(
            f"--arg {text} is neither a tensor nor a Python literal, expected for example "
            "128x512:bf16, 1e-5, True or \"'text'\"; quote strings."
        ) from None


def parse_arguments(texts: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of the kernel."""
    positional, named = [], {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals and name.isidentifier():
            named[name] = parse_value(value)
        else:
            positional.append(parse_value(text))
    return positional, named


def parse_grid(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise UsageError(f"--grid {text}, expected positive sizes such as 4 or 2x8; correct it.")
    return tuple(int(n) for n in text.split("x"))


# --- kernel ---------------------------------------------------------------------------------------
def load_kernel(target: str) -> Any:
    """The kernel that ``FILE:KERNEL`` names.

    Raises:
        UsageError: no such file, it cannot be imported, or it has no such kernel.
    """
    from .core import Kernel

    path_text, colon, name = target.rpartition(":")
    if not colon or not name:
        raise UsageError(f"'{target}' names no kernel, expected FILE:KERNEL; add ':' and its name.")
    path = Path(path_text)
    module = _import(path)
    found = getattr(module, name, None)
    if isinstance(found, Kernel):
        return found
    if isinstance(found, types.FunctionType):
        return Kernel(found)
    known = sorted(k for k, v in vars(module).items() if isinstance(v, Kernel))
    raise UsageError(
        f"{path} has no kernel '{name}', expected one of {', '.join(known) or 'none: it has none'};"
        " name one of those."
    )


def _import(path: Path) -> types.ModuleType:
    if "\0" in str(path) or not path.is_file():
        raise UsageError(f"kernel file {path} does not exist, expected a Python file; correct it.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"kernel file {path} is no Python file, expected a name ending in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"kernel file {path} cannot be imported ({type(error).__name__}: {error}), expected a "
            "module that imports without a device; mend it first."
        ) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def trace(kernel: Any, args: argparse.Namespace) -> Any:
    """The verified Program of the kernel for the arguments of the command line."""
    from .core import NkiError

    positional, named = parse_arguments(args.arg)
    grid = parse_grid(args.grid)
    launched = kernel[grid] if grid else kernel
    try:
        return launched.trace(*positional, **named)
    except NkiError:
        raise
    except (Exception, SystemExit) as error:
        place = _line_of_kernel(error, args.kernel)
        if place:
            raise UsageError(
                f"kernel {kernel.name} raises {type(error).__name__} at {place}: "
                f"{error or 'no message'}; {hint(error) or 'mend that line'}"
            ) from error
        raise UsageError(
            f"kernel {kernel.name} does not trace with these arguments ({type(error).__name__}: "
            f"{error}), expected shapes and constants that it accepts; correct --arg."
        ) from error


def _line_of_kernel(error: BaseException, target: str) -> str:
    """FILE:LINE of the innermost frame in the kernel's file; empty where it did not get there."""
    path = Path(target.rpartition(":")[0]).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
    return f"{path}:{lines[-1]}" if lines else ""


# --- profile --------------------------------------------------------------------------------------
def profile(args: argparse.Namespace) -> None:
    """Trace, schedule, print; write what the command line asks for."""
    from .core.report import plots, report, tables
    from .core.time import cost
    from .core.time.schedule import check_order, schedule

    name = args.dma_profile or cost.DEFAULT_PROFILE
    cost.dma_profile(name)
    check_order(args.schedule)
    program = trace(load_kernel(args.kernel), args)
    found = schedule(program, name, args.schedule)
    summary = report.profile(found)
    others = elsewhere(program, found.total, name, args.schedule)
    console = terminal.output(PIPED_WIDTH)
    tables.print_profile(
        console,
        summary,
        args.top,
        lambda lines: terminal.print_table(
            console, lines, tables.EXPENDABLE, "bound by", "a wider terminal or --json shows them"
        ),
    )
    for other, time in others.items():
        if abs(time / found.total - 1) > DIFFERENCE:
            note = cost.dma_profile(other).note
            console.print(f"with {other}: {tables.microseconds(time)} µs ({note})")
    if args.json:
        content = summary.to_json() | {"time_ns_by_release": others}
        args.json.write_text(json.dumps(content, indent=1))
        console.print(f"figures: {args.json}")
    if args.trace:
        args.trace.write_text(json.dumps(report.perfetto([(summary.name, found)])))
        console.print(f"trace for ui.perfetto.dev: {args.trace}")
    if args.plots:
        for path in plots.all_plots([found], [summary], args.plots):
            console.print(f"plot: {path}")


def elsewhere(program: Any, total: float, name: str, order: str) -> dict[str, float]:
    """Nanoseconds under the DMA profile of every SDK release; empty for an empty kernel."""
    from .core.time import cost
    from .core.time.schedule import schedule

    if not total:
        return {}
    releases = [profile for profile in cost.PROFILES if profile.startswith("sdk")]
    return {
        profile: total if profile == name else schedule(program, profile, order).total
        for profile in releases
    }


def compare(args: argparse.Namespace) -> int:
    """Run the kernel twice on random inputs; 1 where the runs part."""
    from .core.run import compare as comparison

    program = trace(load_kernel(args.kernel), args)
    return 0 if comparison.report(program, args.tolerance, args.against, args.seed) else 1


# --- check ----------------------------------------------------------------------------------------
def check(args: argparse.Namespace) -> int:
    """List the constructs of a file by their provenance; 1 where one is unproven."""
    from .core.check import provenance
    from .core.report import tables

    is_file = Path(args.kernel).is_file()
    path_text, _, name = (args.kernel, "", "") if is_file else args.kernel.rpartition(":")
    found = _constructs(Path(path_text or args.kernel), name)
    if args.arg:
        if not name:
            raise UsageError(
                f"--arg without a kernel, expected {args.kernel}:KERNEL; add its name."
            )
        found.update(provenance.in_program(trace(load_kernel(args.kernel), args)))
    findings = provenance.judge(found)
    console = terminal.output(PIPED_WIDTH)
    terminal.print_table(console, tables.provenance_table(findings), ("lines",), "source")
    console.print(provenance.summary(findings))
    if not args.arg:
        console.print("Types in PSUM and first partitions: name a kernel and its --arg shapes.")
    if args.json:
        args.json.write_text(json.dumps([one._asdict() for one in findings], indent=1))
        console.print(f"list: {args.json}")
    return 1 if provenance.counts(findings)[provenance.UNPROVEN] else 0


def _constructs(path: Path, kernel: str) -> dict[str, list[int]]:
    """Constructs in the source of a file, or of one kernel in it."""
    from .core.check import provenance

    if "\0" in str(path) or not path.is_file():
        raise UsageError(f"kernel file {path} does not exist, expected a Python file; correct it.")
    try:
        return provenance.in_source(path.read_text(encoding="utf-8"), kernel or None)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UsageError(
            f"kernel file {path} is no Python ({error}), expected a Python file; mend it first."
        ) from error
    except LookupError:
        raise UsageError(
            f"{path} has no function '{kernel}', expected one that it defines; correct the name."
        ) from None


def run(arguments: Sequence[str]) -> int:
    """Run a script; its own errors are its own and end as they end without this command."""
    try:
        run_script.run(arguments)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["run"] and arguments[1:2] not in (["-h"], ["--help"]):
        return run(arguments[1:])  # everything after the script is the script's, options too
    args = parser().parse_args(arguments)
    print(ensure_sdk())
    from .core import NkiError

    try:
        if args.command == "compare":
            return compare(args)
        if args.command == "check":
            return check(args)
        profile(args)
    except KeyboardInterrupt:
        print("python -m neuron_cpu: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of standard output has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except (UsageError, NkiError, OSError, MemoryError) as error:
        print(str(error) or type(error).__name__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
