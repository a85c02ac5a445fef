"""``check FILE[:KERNEL]``: constructs of a kernel file, and the sources that show them on a device.

With ``--ref FILE:FUNCTION`` or ``--baseline FILE:KERNEL`` the kernel is judged instead (judged.py).
"""

import argparse
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..console import terminal
from ..console.arguments import above_zero, seed
from ..errors import UsageError, nearest
from ..lessons import with_pointers
from . import kernels

# Columns that a narrow terminal does without, the first one first.
EXPENDABLE = ("lines", "first line", "source")
ELSEWHERE = "a wider terminal or --json shows them"
HELP = "judge a kernel by a reference (--ref), or list constructs that no device is known to take"


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kernel",
        type=kernels.named,
        metavar="FILE[:KERNEL]",
        help="Python file, or one kernel and what it reaches",
    )
    kernels.declare_files(parser, json="write the list, or the figures")
    kernels.declare(parser)
    kernels.declare_time_limit(parser)
    declare_judgement(parser)


def run(args: argparse.Namespace) -> int:
    """Judge the kernel, or list the constructs of a file; 1 where something is not as it should."""
    with kernels.bounded(args):
        if asked(args):
            return judge(args)
        refuse_alone(args)
        return _list_constructs(args)


def _list_constructs(args: argparse.Namespace) -> int:
    """The constructs of a file by their provenance; 1 where one is unproven."""
    from ..core import current  # noqa: F401 - its functions have rows
    from ..core.check import provenance
    from ..core.report import tables

    is_file = Path(args.kernel).is_file()
    path_text, _, name = (args.kernel, "", "") if is_file else args.kernel.rpartition(":")
    found: dict[Any, list[int]] = dict(_constructs(Path(path_text or args.kernel), name))
    if args.arg:
        found.update(provenance.in_program(_program(args)))
    findings = provenance.judge(found)
    console = kernels.output(args)
    terminal.print_table(
        console, tables.provenance_table(findings), EXPENDABLE, "source", ELSEWHERE
    )
    console.print(provenance.summary(findings))
    if not args.arg:
        call = kernels.example(Path(path_text or args.kernel), name)
        console.print(f"No kernel was run; one is by, with your shapes: check {call}")
    kernels.write_json(args, console, [one._asdict() for one in findings], "list")
    counts = provenance.counts(findings)
    return 1 if counts[provenance.UNPROVEN] or counts[provenance.REFUSED] else 0


def _program(args: argparse.Namespace) -> Any:
    """The kernel's program; where it is refused, with the lines with which it is not."""
    from ..core import NkiError
    from ..core.language.specialisation import WrongArguments
    from ..judge import verdict

    kernel = kernels.load_kernel(args.kernel)
    try:
        return kernels.trace(kernel, args)
    except (NkiError, UsageError) as error:
        if isinstance(error.__cause__, WrongArguments):
            raise
        case, grid = kernels.case_of(args), kernels.parse_grid(args.grid)
        raise UsageError("\n".join([str(error), *verdict.accepted(kernel, case, grid)])) from error


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
    except LookupError as error:
        raise UsageError(
            f"{path} has no function '{kernel}', expected one of "
            f"{', '.join(error.args[1:]) or 'none'}; {nearest(kernel, error.args[1:])}."
        ) from None


# options of a judgement, which mean nothing without one
JUDGED = "case", "dtype", "seed", "tolerance", "ref_library", "outputs", "html", "values", "nan"


def declare_judgement(parser: argparse.ArgumentParser) -> None:
    """The options of a judgement by a reference, or beside another kernel."""
    group = parser.add_argument_group("judged by a reference, or beside another kernel")
    kernels.declare_reference(group, "numpy or PyTorch function of the same arguments")
    group.add_argument(
        "--outputs",
        metavar="FUNCTION",
        help="of --ref's file: makes the kernel's results comparable, given both results and then "
        "the arguments",
    )
    group.add_argument(
        "--baseline",
        type=kernels.named,
        metavar="FILE:KERNEL",
        help="the kernel as it was: compare times, by line too",
    )
    group.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="'ARG ...'",
        help="arguments of one more call, as in --arg; repeat. A tensor may name limits of its "
        "values: 128x1:i32:0..999",
    )
    group.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="TYPE,...",
        help="type in place of all floating-point ones; repeat",
    )
    group.add_argument(
        "--values",
        action="append",
        metavar="KIND,...",
        help="values to try, such as random,tiny; repeat (default: random,zeros,ties,large)",
    )
    group.add_argument("--seed", type=seed, action="append", help="seed of values; repeat (0)")
    group.add_argument(
        "--tolerance",
        type=above_zero,
        help="largest accepted error, relative to the element or its row (default: by the types)",
    )
    group.add_argument(
        "--nan",
        choices=("any", "same"),
        help="where the reference is NaN: nothing is asked, or NaN, with NaN among the inputs",
    )
    kernels.declare_files(
        group, html="write one page to look at: verdicts, and the profile of every legal case"
    )


def asked(args: argparse.Namespace) -> bool:
    """Whether the command line asks for a judgement."""
    return bool(args.ref or args.baseline)


def refuse_alone(args: argparse.Namespace, judged: Sequence[str] = JUDGED) -> None:
    """Refuse options of a judgement without a judgement."""
    given = [flag for flag in judged if getattr(args, flag)]
    if given:
        raise UsageError(
            f"--{given[0].replace('_', '-')} without a reference, expected --ref FILE:FUNCTION"
            f"{' or --baseline FILE:KERNEL' if 'baseline' in args else ''}; add one."
        )


def judge(args: argparse.Namespace) -> int:
    """Judge, print, write; 1 where a case is illegal or wrong."""
    from ..judge import cases as forms
    from ..judge import chips, tables
    from ..page.write import as_table

    settings, cases = settings_of(args), cases_of(args)
    reference = load_reference(args)
    kernel = kernels.load_kernel(args.kernel)
    forms.check_calls(args.case, kernel.function)
    baseline = args.baseline and kernels.load_kernel(args.baseline)
    cases = [one.resolved(kernels.objects(args.kernel)) for one in cases]
    console, shown = kernels.output(args), list[Any]()

    def judged(kernel: Any, target: str) -> list:
        found = _judged(kernel, target, reference, cases, settings)
        table = tables.verdict_table(found, tables.title(target, reference, settings))
        shown.append(as_table(table))
        terminal.print_table(console, table, tables.EXPENDABLE, "arguments", "--json")
        return found

    with console.status("the kernel is judged"):
        verdicts = judged(kernel, args.kernel)
    said = "\n".join(tables.sentences(verdicts))
    console.print(with_pointers(said))
    other = chips.others(kernel, cases[-1], settings.grid) if verdicts[-1].legal else {}
    if other:
        console.print(chips.sentence(kernel, other))
    content: dict[str, Any] = {
        "kernel": args.kernel,
        "reference": args.ref,
        "cases": [verdict.to_json() for verdict in verdicts],
        "passed": all(verdict.correct for verdict in verdicts),
        "chips": other,
    }
    theirs: list = []
    if args.baseline:
        theirs = judged(baseline, args.baseline)
        content["baseline"] = _beside(console, args, verdicts, theirs, shown)
    console.print(estimate_line(settings))
    kernels.write_json(args, console, content)
    if args.html:
        _write_page(args, [verdicts, theirs], shown, said)
        console.print(f"page: {args.html}")
    return 0 if content["passed"] else 1


def estimate_line(settings: Any) -> str:
    """The line below every table with estimated times."""
    from ..core.report.tables import estimate_note

    return f"Times: {estimate_note(settings.dma_profile)}."


def _judged(kernel: Any, target: str, reference: Any, cases: list, settings: Any) -> list:
    from ..judge import verdict

    with kernels.told_as_usage(kernel, target, cases[0]):
        found = [verdict.judge(kernel, reference, case, settings) for case in cases]
    path, _, name = target.rpartition(":")
    files = [path, *([inspect.getsourcefile(reference.function)] if reference else [])]
    if not (kernels.jitted(kernels.objects(target)[name]) or kernels.handed_on(name, files)):
        lacks = f"{target} has no @nki.jit, so a call of it fails; write @nki.jit above it"
        for one in found:
            one.refusal = one.refusal or lacks
    return found


def _beside(
    console: Any, args: argparse.Namespace, verdicts: list, theirs: list, shown: list
) -> dict[str, Any]:
    """The baseline's verdicts, the ratios, and for the last case both kernels' lines, whose table
    is added to ``shown``."""
    from ..judge import lines, tables
    from ..page.write import as_table

    ratios: list[float | None] = []
    for mine, before in zip(verdicts, theirs):
        if mine.speed is None or before.speed is None:
            ratios.append(None)
            if mine.speed is not None:
                console.print("\n".join(tables.sentences([before])))
            continue
        ratios.append(before.speed.time_ns / mine.speed.time_ns)
        console.print(f"{mine.case}: {ratios[-1]:.2f} times as fast as {args.baseline}")
    pairs: list = []
    if ratios[-1] is not None:
        pairs = lines.paired(*(lines.lines(one[-1].schedule) for one in (theirs, verdicts)))
        table = tables.line_table(pairs, args.baseline, args.kernel)
        shown.append(as_table(table))
        terminal.print_table(console, table, (), "source")
    return {
        "kernel": args.baseline,
        "cases": [one.to_json() for one in theirs],
        "speedups": ratios,
        "lines": [pair._asdict() for pair in pairs],
    }


def _write_page(args: argparse.Namespace, both: list[list], shown: list, said: str) -> None:
    """Tables and sentences as one page, with the profile of every legal case of the kernel and, in
    `both`, of the baseline."""
    from ..page import data
    from ..page.write import write

    labels = [kernels.label(args.kernel)]
    if args.baseline:
        labels.append(kernels.label(args.baseline, args.kernel))
    pages = [
        [data.run(f"{label} {one.case}", one.schedule) for one in verdicts if one.schedule]
        for label, verdicts in zip(labels, both)
    ]
    beside = len(pages[0]) if all(pages) and args.baseline else None
    told = said.split("\n") if said else []
    write(args.html, labels[0], sum(pages, []), beside, shown, told)


# --- from the command line ------------------------------------------------------------------------
def load_reference(args: argparse.Namespace) -> Any:
    """The Reference that --ref names, None without it."""
    from ..judge.references import Reference

    if args.ref is None:
        if args.outputs:
            raise UsageError("--outputs without a reference, expected --ref FILE:FUNCTION; add it.")
        return None
    outputs = args.outputs and kernels.load_function(
        args.outputs if ":" in args.outputs else f"{args.ref.rpartition(':')[0]}:{args.outputs}"
    )
    return Reference(kernels.load_function(args.ref), args.ref_library, outputs)


def settings_of(args: argparse.Namespace) -> Any:
    from ..judge.cases import KINDS
    from ..judge.verdict import Settings

    return Settings(
        grid=kernels.parse_grid(args.grid),
        kinds=kinds_of(args.values or KINDS),
        seeds=tuple(dict.fromkeys(args.seed or (0,))),
        tolerance=args.tolerance,
        nan=args.nan or "any",
    )


def kinds_of(texts: Iterable[str]) -> tuple[str, ...]:
    """The kinds of values that --values names, each time with commas between them."""
    from ..judge.cases import HARD, KINDS, SIGNS

    text, known = ",".join(texts), (*KINDS, *HARD, *SIGNS)
    kinds = tuple(dict.fromkeys(filter(None, text.split(","))))
    if not kinds or not set(kinds) <= set(known):
        raise UsageError(
            f"--values {text}, expected some of {','.join(known)}; write --values "
            f"{','.join([v for k in kinds for v in known if v.startswith(k)] or KINDS)}."
        )
    return kinds


def cases_of(args: argparse.Namespace) -> list:
    """The cases of --arg and --case, each in every --dtype."""
    from ..judge import cases

    made = [cases.parse_case(args.arg)] if args.arg else []
    made += [cases.case(text) for text in args.case]
    if not made:
        raise UsageError(
            f"{args.kernel} is to be judged without arguments, expected their shapes; add --arg "
            "128x512:bf16 for each, or --case."
        )
    names = [name for text in args.dtype for name in text.split(",")]
    dtypes = [cases.parse_dtype(name, f"--dtype {name}") for name in names]
    wrong = [name for name, dtype in zip(names, dtypes) if not dtype.is_floating_point]
    if wrong:
        raise UsageError(f"--dtype {wrong[0]}, expected a floating-point type; write bf16.")
    return [one.with_floats(dtype) for one in made for dtype in dtypes] if dtypes else made
