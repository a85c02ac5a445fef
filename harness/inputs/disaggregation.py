"""The command line's arguments of prefill in one process and decode in another.

Roles, `--kv-ip` and `--kv-port` are those of vLLM's KVTransferConfig, which the SDK's connector is
configured by.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Optional

from harness.errors import UserError
from harness.inputs import serving
from harness.settings import Settings, Transfer

MODE = "disaggregate"
PRODUCER, CONSUMER = "kv_producer", "kv_consumer"
FLAGS = ("--kv-role", "--kv-ip", "--kv-port", "--kv-timeout")
_OF_ROLES = ("kv_ip", "kv_port", "kv_timeout")


def add_arguments(parser: argparse.ArgumentParser, above_zero: Callable[[str], float]) -> None:
    """The group of arguments, with the types of the rest of the command line."""
    group = parser.add_argument_group("disaggregate (names of vLLM's KVTransferConfig)")
    group.add_argument(
        "--kv-role",
        choices=(PRODUCER, CONSUMER),
        help="prefill for another process, or decode what another one prefills (default: both "
        "processes here)",
    )
    group.add_argument(
        "--kv-ip", metavar="ADDRESS", help="of the side that prefills (default: 127.0.0.1)"
    )
    group.add_argument("--kv-port", type=serving.port, metavar="N", help="its port, 14579")
    group.add_argument(
        "--kv-timeout",
        type=above_zero,
        metavar="S",
        help="to wait for the other side to come (default: 60; kv_producer: 600)",
    )


def asked(args: argparse.Namespace) -> Optional[Transfer]:
    """What the arguments ask for; None in other modes."""
    if args.mode != MODE:
        return None
    for name in _OF_ROLES:
        if args.kv_role is None and getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{flag} is about a side that runs by itself; give --kv-role, too, or leave it out."
            )
    given = {name: getattr(args, name) for name in _OF_ROLES if getattr(args, name) is not None}
    if args.kv_role == PRODUCER:
        given.setdefault("kv_timeout", 600.0)
    return Transfer(role=args.kv_role, **given)


def check(settings: Settings) -> None:
    """Refuse what has no line of the cache that could be moved, or no process of its own."""
    if settings.transfer is None:
        return
    others = {
        "--padding-side left": settings.padding_side == "left",
        "--flash-decoding-enabled": settings.flash_decoding_enabled,
        "--async-mode": bool(settings.async_mode),
        "--no-isolate": not settings.isolate,
    }
    for flag, given in others.items():
        if given:
            raise UserError(
                f"--mode {MODE} moves the line of one sequence from process to process and does "
                f"not go with {flag}; leave it out."
            )
    if settings.transfer.role == PRODUCER and settings.prompts:
        raise UserError(
            "A kv_producer prefills what the kv_consumer asks for, got prompts; give --prompt and "
            "--prompt-file to the kv_consumer."
        )
    if settings.transfer.role == CONSUMER and settings.transfer.kv_port == 0:
        raise UserError("--kv-port must be the kv_producer's, from 1 on, got 0.")
