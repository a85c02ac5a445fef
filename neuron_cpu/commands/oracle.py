"""``oracle``: verdicts, estimates and reasons for searches of kernels, as lines of JSON."""

import argparse
import contextlib
import json
import signal
from typing import Annotated, Any

from .. import cluster
from ..console.arguments import above_zero, positive
from ..errors import UsageError
from . import kernels

HELP = "judge candidates of a search: JSON in, JSON out"


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs", type=positive, help="candidates at the same time (default: the processors)"
    )
    parser.add_argument(
        "--memory-limit", type=above_zero, default=4.0, help="GiB that a request may ask for (4)"
    )
    parser.add_argument("--mcp", action="store_true", help="serve as a tool over MCP instead")
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
                if args.mcp:
                    _tool(oracle).run()
                else:
                    serve.standard_streams(oracle)
    return 0


def _tool(oracle: Any) -> Any:
    """The oracle as one tool of a server of the Model Context Protocol."""
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError as error:
        raise UsageError(
            "--mcp needs the package mcp, which is not installed; pip install 'mcp>=2.3,<3'."
        ) from error
    from pydantic import WithJsonSchema

    from ..oracle import forms

    whole = forms.Request.model_json_schema(ref_template="{model}")
    parts = whole.pop("$defs")  # a schema within another one has no references of its own
    fields = json.loads(json.dumps(whole), object_hook=lambda one: parts.get(one.get("$ref"), one))

    def judge_kernel(request: Annotated[Any, WithJsonSchema(fields)]) -> dict[str, Any]:
        """Judge an NKI kernel without a device: legal, right, estimated time, what bounds it."""
        found = forms.request(request)  # here, so that a wrong one has an answer as elsewhere
        return oracle.one(found) if isinstance(found, forms.Request) else found

    server = MCPServer("neuron_cpu")
    server.add_tool(judge_kernel)
    return server
