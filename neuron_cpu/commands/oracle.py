"""``oracle``: verdicts, estimates and reasons for searches of kernels, as lines of JSON."""

import argparse
import contextlib
import json
import signal
import sys
from pathlib import Path
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
    parser.add_argument(
        "--port", type=int, help="serve on this port of the loopback (0: a free one, told)"
    )
    parser.add_argument(
        "--key-file", type=Path, help="its first line is the key that a client of --port sends"
    )
    parser.add_argument("--mcp", action="store_true", help="serve as a tool over MCP instead")
    parser.add_argument("--schema", action="store_true", help="print the schema of a request")
    parser.add_argument("--scheduler", metavar="ADDRESS", help=cluster.HELP)
    kernels.declare_isolation(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until standard input ends, or until Ctrl-C on a port."""
    from ..oracle import forms, serve

    if args.schema:
        print(json.dumps(forms.Request.model_json_schema(), indent=1))
        return 0
    if (args.port is None) != (args.key_file is None):
        raise UsageError("--port and --key-file belong together; give both, or neither.")
    if args.mcp and args.port is not None:
        raise UsageError("--mcp speaks on standard streams, expected no --port; leave out one.")
    kernels.confined(args)
    with cluster.joined(args.scheduler) as elsewhere:
        jobs = cluster.jobs(args.jobs, elsewhere)
        with contextlib.closing(serve.Oracle(jobs, args.memory_limit, cluster=elsewhere)) as oracle:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            with contextlib.suppress(KeyboardInterrupt):
                _serve(oracle, args)
    return 0


def _serve(oracle: Any, args: argparse.Namespace) -> None:
    from ..oracle import serve

    if args.mcp:
        _tool(oracle).run()
    elif args.port is None:
        serve.standard_streams(oracle)
    else:
        with _server(oracle, args) as server:
            print(f"oracle on 127.0.0.1:{server.server_address[1]}", file=sys.stderr)
            server.serve_forever()


def _server(oracle: Any, args: argparse.Namespace) -> Any:
    from ..oracle import serve

    try:
        key = args.key_file.read_text(encoding="utf-8").partition("\n")[0].strip()
        if len(key) < 16:
            raise ValueError(f"a key of {len(key)} letters, expected at least 16")
        return serve.Server(oracle, args.port, key)
    except (OSError, ValueError, OverflowError) as error:
        raise UsageError(
            f"--port {args.port} with --key-file {args.key_file} cannot be served ({error}); name "
            "a free port and a file whose first line is a key."
        ) from error


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
