"""The command line's arguments for several tokens a step: who guesses, and how many.

Names are NxDI's (inference_demo.py) and, for prompt lookup, those of transformers' generate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from harness.errors import UserError
from harness.settings import Settings, Speculation

LOOKUP, DRAFT = "lookup", "draft"
METHODS = {
    LOOKUP: "what followed the newest tokens where they stood before (prompt lookup)",
    DRAFT: "a smaller model with the same vocabulary (--draft-model-path)",
}
DEFAULT_LENGTH = 5  # tokens of a step: more than 4 guesses are rarely all right
MOST_LENGTH = 128  # the kernels' mask of new tokens among themselves: one query a partition
FLAGS = ("--speculate", "--prompt-lookup-num-tokens", "--draft-model-path", "--speculation-length")


def add_arguments(
    parser: argparse.ArgumentParser, positive: Callable[[str], int], path: Callable[[str], Path]
) -> None:
    """The group of arguments, with the types of the rest of the command line."""
    group = parser.add_argument_group("several tokens a step (one prompt at a time)")
    group.add_argument(
        "--speculate", choices=list(METHODS), metavar="METHOD", help=f"{' or '.join(METHODS)}"
    )
    group.add_argument(
        "--prompt-lookup-num-tokens",
        type=positive,
        metavar="N",
        help="guess N tokens by what followed the newest ones earlier in the text",
    )
    group.add_argument(
        "--draft-model-path", type=path, help="folder of a smaller model, which guesses"
    )
    group.add_argument(
        "--speculation-length",
        type=positive,
        metavar="K",
        help=f"tokens of a step, guesses and one more (default: {DEFAULT_LENGTH})",
    )


def asked(args: argparse.Namespace) -> Optional[Speculation]:
    """What the arguments ask for; None where they ask for one token a step."""
    lookup, draft = args.prompt_lookup_num_tokens, args.draft_model_path
    if lookup is not None and draft is not None:
        raise UserError(
            "--prompt-lookup-num-tokens and --draft-model-path name two ways to guess; give one."
        )
    implied = LOOKUP if lookup is not None else DRAFT if draft is not None else None
    method = args.speculate or implied
    if method is None:
        if args.speculation_length is not None:
            raise UserError(
                "--speculation-length needs a way to guess; give --speculate, "
                "--prompt-lookup-num-tokens or --draft-model-path too."
            )
        return None
    if implied not in (None, method):
        raise UserError(f"--speculate {method} does not go with --speculate {implied}'s arguments.")
    if method == DRAFT and draft is None:
        raise UserError("--speculate draft needs --draft-model-path, the model that guesses.")
    length = args.speculation_length or DEFAULT_LENGTH
    if lookup is not None:
        if args.speculation_length not in (None, lookup + 1):
            raise UserError(
                f"--speculation-length must be {lookup + 1} with --prompt-lookup-num-tokens "
                f"{lookup}, the guesses and one more, got {args.speculation_length}; leave it out."
            )
        length = lookup + 1
    return Speculation(method, length, draft)


def check(settings: Settings) -> None:
    """Refuse with a UserError what no model could take."""
    if settings.speculation is None:
        return
    length, most = settings.speculation.length, min(MOST_LENGTH, settings.seq_len - 1)
    if not 2 <= length <= most:
        raise UserError(
            f"A step of speculation has at least 2 and at most {most} tokens with --seq-len "
            f"{settings.seq_len}, got {length}; change --speculation-length or "
            "--prompt-lookup-num-tokens."
        )
    others: dict[str, Any] = {
        "--padding-side left": settings.padding_side == "left",
        "--on-device-sampling": settings.on_device_sampling,
        f"--batch-size {settings.batch_size}": settings.batch_size > 1,
        "--prefill-chunk": settings.prefill_chunk is not None,
        "--is-continuous-batching": settings.is_continuous_batching,
    }
    for flag, given in others.items():
        if given:
            raise UserError(
                "Speculation takes one prompt at a time, whole and padded on the right, and "
                f"chooses tokens on the host, got {flag}; leave one of them out."
            )
