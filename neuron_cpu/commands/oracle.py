"""``oracle``: verdicts, estimates and reasons for searches of kernels, as lines of JSON."""

import argparse
import contextlib
import json
import signal

from .. import cluster
from ..console.arguments import above_zero, positive
from . import kernels

HELP = "judge candidates of a search: JSON in, JSON out"


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs", type=positive, help="candidates at the same time (default: the processors)"
    )
    parser.add_argument(
        "--memory-limit", type=above_zero, default=4.0, help="GiB that a request may ask for (4)"
    )
    parser.add_argument("--schema", action="store_true", help="print the schema of a request")
    parser.add_argument("--scheduler", metavar="ADDRESS", help=cluster.HELP)
    kernels.declare_isolation(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until standard input ends."""
    from ..oracle import forms, serve

    if args.schema:
        print(json.dumps(forms.Request.model_json_schema(), indent=1))
        return 0
    kernels.confined(args)
    with cluster.joined(args.scheduler) as elsewhere:
        jobs = cluster.jobs(args.jobs, elsewhere)
        with contextlib.closing(serve.Oracle(jobs, args.memory_limit, cluster=elsewhere)) as oracle:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            with contextlib.suppress(KeyboardInterrupt):
                serve.standard_streams(oracle)
    return 0
