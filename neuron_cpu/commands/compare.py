"""``compare FILE:KERNEL --arg ...``: the first instruction whose results part from a reference."""

import argparse

from ..console.arguments import at_least_zero, seed
from . import kernels

HELP = "find the first instruction that loses precision"


def declare(parser: argparse.ArgumentParser) -> None:
    kernels.declare_kernel(parser)
    kernels.declare_time_limit(parser)
    parser.add_argument(
        "--against",
        choices=("shadow", "unmerged", "noise"),
        default="shadow",
        help="reference: all float tiles in fp32, execution without merged loops, or a run that "
        "changes the last bit of each result at random: the first line whose values cancel",
    )
    parser.add_argument(
        "--tolerance",
        type=at_least_zero,
        default=0.02,
        help="largest accepted difference, relative to a result's largest magnitude",
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the random inputs")
    kernels.declare_files(parser, json="write what was found")


def run(args: argparse.Namespace) -> int:
    """Run the kernel twice on random inputs; 1 where the runs part."""
    from ..core.run import compare as comparison
    from ..judge.verdict import tensors_of

    with kernels.bounded(args):
        program = kernels.trace(kernels.load_kernel(args.kernel), args, args.seed)
    inputs = tensors_of(*kernels.case_of(args).values("random", args.seed))
    found = comparison.compare(program, inputs, args.tolerance, args.against)
    console = kernels.output(args)
    console.print(str(found))
    kernels.write_json(args, console, found.to_json(), "comparison")
    return 1 if found.parts else 0
