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

LOOKUP, DRAFT, FUSED, EAGLE = "lookup", "draft", "fused", "eagle"
METHODS = {
    LOOKUP: "what followed the newest tokens where they stood before (prompt lookup)",
    DRAFT: "a smaller model with the same vocabulary (--draft-model-path)",
    FUSED: "the same, in one graph with the target (--enable-fused-speculation)",
    EAGLE: "an EAGLE head in that place (--enable-eagle-speculation)",
}
DEFAULT_LENGTH = 5  # tokens of a step: more than 4 guesses are rarely all right
MOST_LENGTH = 128  # the kernels' mask of new tokens among themselves: one query a partition
FLAGS = (
    *("--speculate", "--prompt-lookup-num-tokens", "--draft-model-path", "--speculation-length"),
    *("--enable-fused-speculation", "--enable-eagle-speculation"),
    "--enable-eagle-draft-input-norm",
)


def add_arguments(
    parser: argparse.ArgumentParser, positive: Callable[[str], int], path: Callable[[str], Path]
) -> None:
    """The group of arguments, with the types of the rest of the command line."""
    group = parser.add_argument_group("several tokens a step (one prompt at a time)")
    group.add_argument(
        "--speculate", choices=list(METHODS), metavar="METHOD", help=f"{', '.join(METHODS)}"
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
    for name, what in (
        ("fused-speculation", "draft and target in one graph"),
        ("eagle-speculation", "the same with an EAGLE head as the draft"),
        ("eagle-draft-input-norm", "the EAGLE head's layer has a norm in front"),
    ):
        group.add_argument(f"--enable-{name}", action="store_true", help=what)


def asked(args: argparse.Namespace) -> Optional[Speculation]:
    """What the arguments ask for; None where they ask for one token a step."""
    lookup, draft = args.prompt_lookup_num_tokens, args.draft_model_path
    if args.enable_eagle_draft_input_norm and not (
        args.enable_eagle_speculation or args.speculate == EAGLE
    ):
        raise UserError("--enable-eagle-draft-input-norm needs --enable-eagle-speculation.")
    if lookup is not None and draft is not None:
        raise UserError(
            "--prompt-lookup-num-tokens and --draft-model-path name two ways to guess; give one."
        )
    implied = LOOKUP if lookup is not None else DRAFT if draft is not None else None
    if args.enable_fused_speculation or args.enable_eagle_speculation:
        implied = EAGLE if args.enable_eagle_speculation else FUSED
    elif implied == DRAFT and args.speculate in (FUSED, EAGLE):
        implied = args.speculate
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
    if method != LOOKUP and draft is None:
        raise UserError(f"Speculation ({method}) needs --draft-model-path, the model that guesses.")
    if method != LOOKUP and lookup is not None:
        raise UserError(f"--prompt-lookup-num-tokens does not go with {method} speculation.")
    length = args.speculation_length or DEFAULT_LENGTH
    if lookup is not None:
        if args.speculation_length not in (None, lookup + 1):
            raise UserError(
                f"--speculation-length must be {lookup + 1} with --prompt-lookup-num-tokens "
                f"{lookup}, the guesses and one more, got {args.speculation_length}; leave it out."
            )
        length = lookup + 1
    return Speculation(
        method,
        length,
        draft,
        fused=method in (FUSED, EAGLE),
        eagle=method == EAGLE,
        eagle_input_norm=args.enable_eagle_draft_input_norm,
    )


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
