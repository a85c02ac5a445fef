"""The command line's arguments of the server: where it listens, who may ask, how many may wait."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Optional

from harness.settings import Serving
from neuron_cpu.console.arguments import shown

SLOTS = 8  # answers at once: what the shipped kernels decode together in about the time of one
FLAGS = ("--host", "--port", "--api-key-file", "--max-waiting", "--drain-seconds")


def port(text: str) -> int:
    """A number of a TCP port; 0 stands for a free one."""
    if not text.isascii() or not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {shown(text)}")
    return int(text)


def add_arguments(
    parser: argparse.ArgumentParser, whole: Callable[[str], int], path: Callable[[str], Path]
) -> None:
    """The group of arguments, with the types of the rest of the command line."""
    group = parser.add_argument_group(f"server (--batch-size answers at once, {SLOTS} by default)")
    group.add_argument("--host", metavar="ADDRESS", help="to listen on (default: 127.0.0.1)")
    group.add_argument("--port", type=port, metavar="N", help="default: 8000; 0: a free one")
    group.add_argument(
        "--api-key-file", type=path, help="its first line is the key that requests must carry"
    )
    group.add_argument(
        "--max-waiting",
        type=whole,
        metavar="N",
        help="answers in the queue, beyond which requests are refused (default: 64)",
    )
    group.add_argument(
        "--drain-seconds",
        type=whole,
        metavar="S",
        help="for answers that run when the server is to end (default: 30)",
    )


def asked(args: argparse.Namespace) -> Optional[Serving]:
    """What the arguments ask for; None in other modes."""
    if args.mode != "serve":
        return None
    given = {
        name: getattr(args, name)
        for name in ("host", "port", "api_key_file", "max_waiting", "drain_seconds")
        if getattr(args, name) is not None
    }
    return Serving(**given)
