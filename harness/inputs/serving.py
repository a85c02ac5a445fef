"""The command line's arguments of the server: where it listens, who may ask, how many may wait."""

import argparse
from typing import Optional

from harness.settings import Serving
from neuron_cpu.console.arguments import shown

SLOTS = 8  # answers at once: what the shipped kernels decode together in about the time of one


def port(text: str) -> int:
    """A number of a TCP port; 0 stands for a free one."""
    if not text.isascii() or not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {shown(text)}")
    return int(text)


def asked(args: argparse.Namespace) -> Optional[Serving]:
    """The server's settings of the arguments; None in other modes."""
    if args.mode != "serve":
        return None
    given = {
        name: getattr(args, name)
        for name in ("host", "port", "api_key_file", "max_waiting", "drain_seconds")
        if getattr(args, name) is not None
    }
    return Serving(**given)
