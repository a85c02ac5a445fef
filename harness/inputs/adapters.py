"""The command line's arguments of low-rank adapters; names are NxDI's (inference_demo.py)."""

import argparse
from pathlib import Path
from typing import Optional

from harness.errors import UserError
from harness.settings import Adapters

BASE = "0"  # NxDI's id of the model without an adapter
_CONFIG = "adapter_config.json"


def asked(args: argparse.Namespace) -> Optional[Adapters]:
    """The adapters of the arguments, each folder checked; None without adapters."""
    if args.lora_ckpt_path is None:
        for flag, value in (
            ("--adapter-id", args.adapter_id),
            ("--max-lora-rank", args.max_lora_rank),
        ):
            if value is not None:
                raise UserError(f"{flag} needs an adapter; give --lora-ckpt-path ID:FOLDER.")
        return None
    paths: dict[str, Path] = {}
    for entry in args.lora_ckpt_path:
        name, _, folder = (part.strip() for part in entry.partition(":"))
        path = Path(folder).expanduser().absolute()
        if not folder or not name or name == BASE or name in paths:
            raise UserError(
                f"--lora-ckpt-path {entry!r} must be ID:FOLDER with a name of its own, not {BASE}."
            )
        if not (path / _CONFIG).is_file():
            raise UserError(f"The adapter {path} has no {_CONFIG}; name a folder that PEFT saved.")
        paths[name] = path
    if args.adapter_id not in (None, BASE, *paths):
        raise UserError(
            f"--adapter-id {args.adapter_id!r} is none of {', '.join(paths)}; name one of them."
        )
    return Adapters(tuple(paths.items()), args.adapter_id or BASE, args.max_lora_rank)
