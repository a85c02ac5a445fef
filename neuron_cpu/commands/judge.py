"""``judge DIR``: answers to the suite's thirty operators, judged and scored."""

import argparse
import contextlib
import os
import secrets
from pathlib import Path
from typing import Any

from .. import cluster
from ..console import terminal
from ..console.arguments import above_zero, positive, seed
from ..errors import UsageError, nearest
from . import check, kernels

HELP = "score a folder of kernels on a suite of thirty operators"


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="one file an operator, each with a function kernel"
    )
    parser.add_argument(
        "--template", action="store_true", help="write the operators with naive kernels into DIR"
    )
    parser.add_argument("--only", metavar="NAME,...", help="some operators of the suite")
    parser.add_argument("--seed", type=seed, action="append", help="seed of values; repeat (drawn)")
    parser.add_argument(
        "--jobs", type=positive, help="answers at the same time (default: half of the processors)"
    )
    parser.add_argument("--scheduler", metavar="ADDRESS", help=cluster.HELP)
    parser.add_argument(
        "--time-limit", type=above_zero, default=120.0, help="seconds for one answer (120)"
    )
    parser.add_argument(
        "--cpu-limit", type=positive, default=120, help="processor seconds for one answer (120)"
    )
    parser.add_argument(
        "--memory-limit", type=above_zero, default=4.0, help="GiB of data for one answer (4)"
    )
    kernels.declare_isolation(parser)
    kernels.declare_files(parser, json="write all figures")


def run(args: argparse.Namespace) -> int:
    """Judge or write the template; 1 where an answer is missing, illegal or wrong."""
    from .. import suite

    names = _names(args.only, suite.names())
    if args.template:
        return _write_template(args.folder, names)
    if args.folder.is_file():
        raise UsageError(
            f"{args.folder} is a file, expected a folder with one file an operator; a kernel by "
            f"itself is judged by neuron_cpu check {kernels.example(args.folder, '')}."
        )
    if not any((args.folder / f"{name}.py").is_file() for name in names):
        lacks = f"has no {names[0]}.py or other" if args.folder.is_dir() else "does not exist"
        raise UsageError(
            f"folder {args.folder} {lacks}, expected one file an operator; write them with "
            f"neuron_cpu judge {args.folder} --template."
        )
    return _judge(args, names)


def _names(only: str | None, known: dict[str, int]) -> list[str]:
    wanted = list(known) if only is None else [name for name in only.split(",") if name]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise UsageError(
            f"--only names {unknown[0] if unknown else 'nothing'}, expected some of "
            f"{', '.join(known)}; {nearest(''.join(unknown[:1]), known)}."
        )
    return wanted


def _write_template(folder: Path, names: list[str]) -> int:
    """The suite's own files: task, reference, and a kernel that is right and slow."""
    from .. import suite

    folder.mkdir(parents=True, exist_ok=True)
    present = [name for name in names if (folder / f"{name}.py").exists()]
    if present:
        raise UsageError(
            f"{folder} has {present[0]}.py already, expected a folder without answers; nothing was "
            "written, name another folder."
        )
    for name in names:
        (folder / f"{name}.py").write_text(suite.template(name), encoding="utf-8")
    print(f"{len(names)} operators: {folder}")
    return 0


def _judge(args: argparse.Namespace, names: list[str]) -> int:
    from ..judge.verdict import Settings
    from ..oracle.forms import Bounds
    from ..suite import score
    from ..suite.strangers import Judging

    kernels.confined(args)
    console = kernels.output(args)
    # A seed that is drawn is known to nobody else before the answers are judged.
    seeds = tuple(dict.fromkeys(args.seed or (secrets.randbelow(1 << 32),)))
    bounds = Bounds(
        seconds=args.time_limit, cpu_seconds=args.cpu_limit, memory_gib=args.memory_limit
    )
    with contextlib.ExitStack() as open_ones:
        elsewhere = open_ones.enter_context(cluster.joined(args.scheduler))
        half = max(1, (os.cpu_count() or 1) // 2)
        jobs = cluster.jobs(args.jobs or (half if elsewhere is None else None), elsewhere)
        judging = Judging(args.folder, seeds, bounds, jobs, elsewhere)
        open_ones.callback(judging.close)
        status = open_ones.enter_context(console.status(""))
        waiting = list(names)

        def done(outcome: Any) -> None:
            waiting.remove(outcome.operator)
            status.update(f"{len(waiting)} left: {', '.join(waiting[:3])}")

        outcomes = judging.judge(names, done)
    found = score.score(outcomes)
    terminal.print_table(console, score.outcome_table(outcomes), score.EXPENDABLE, "", "--json")
    for sentence in score.reasons(outcomes):
        console.print(sentence)
    if any(one.word == "wrong" for one in outcomes):
        place = args.folder / "NAME.py"
        console.print(
            f"Where one goes wrong: neuron_cpu check {place}:kernel --ref {place}:reference "
            "--case 'ARGUMENTS'"
        )
    terminal.print_table(console, score.score_table(found))
    console.print(check.estimate_line(Settings()))
    console.print(f"Values: --seed {' --seed '.join(map(str, seeds))}")
    content = {"seeds": seeds, "score": found, "answers": [one.to_json() for one in outcomes]}
    kernels.write_json(args, console, content)
    return 0 if all(one.correct for one in outcomes) else 1
