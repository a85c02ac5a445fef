"""The command line's arguments of prefill in one process and decode in another.

Roles, `--kv-ip` and `--kv-port` are those of vLLM's KVTransferConfig, which the SDK's connector is
configured by.
"""

import argparse
from typing import Optional

from harness.errors import UserError, refuse_any
from harness.settings import Settings, Transfer

MODE = "disaggregate"
PRODUCER, CONSUMER = "kv_producer", "kv_consumer"
_OF_ROLES = ("kv_ip", "kv_port", "kv_timeout", "kv_key_file")


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
    refuse_any(
        others,
        "--mode disaggregate moves the line of one sequence from process to process and does not "
        "go with {}; leave it out.",
    )
    if settings.transfer.role == PRODUCER and settings.prompts:
        raise UserError(
            "A kv_producer prefills what the kv_consumer asks for, got prompts; give --prompt and "
            "--prompt-file to the kv_consumer."
        )
    if settings.transfer.role == CONSUMER and settings.transfer.kv_port == 0:
        raise UserError("--kv-port must be the kv_producer's, from 1 on, got 0.")
