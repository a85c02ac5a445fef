"""The command line's arguments for several tokens a step: the guesser, and how many tokens. Names
are NxDI's (inference_demo.py); for prompt lookup they are transformers'.
"""

import argparse
from typing import Any, Optional

from harness.errors import UserError, refuse_any
from harness.inputs import experiments
from harness.inputs.experiments import EAGLE, MEDUSA, TokenTree
from harness.settings import Settings, Speculation

LOOKUP, DRAFT, FUSED = "lookup", "draft", "fused"
METHODS = {
    LOOKUP: "what followed the newest tokens where they stood before (prompt lookup)",
    DRAFT: "a smaller model with the same vocabulary (--draft-model-path)",
    FUSED: "the same, in one graph with the target (with --libraries)",
    EAGLE: "an EAGLE head in that place (with --libraries)",
    MEDUSA: "heads of the model's own (with --libraries)",
}
DEFAULT_LENGTH = 5  # tokens of a step: more than 4 guesses are rarely all right
MOST_LENGTH = 128  # the kernels' mask of new tokens among themselves: one query a partition


def asked(args: argparse.Namespace) -> Optional[Speculation]:
    """The speculation of the arguments; None for one token a step."""
    lookup, draft = args.prompt_lookup_num_tokens, args.draft_model_path
    if args.is_medusa or args.speculate == MEDUSA:
        return experiments.medusa(args)
    experiments.check_flags(args)
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
    tree: TokenTree = ()
    if args.token_tree_json is not None:
        tree, length = experiments.token_tree(args, MOST_LENGTH)
    return Speculation(
        method,
        length,
        draft,
        fused=method in (FUSED, EAGLE),
        eagle=method == EAGLE,
        eagle_input_norm=args.enable_eagle_draft_input_norm,
        token_tree=tree,
    )


def check(settings: Settings) -> None:
    """Refuse with a UserError settings that no model could take."""
    if settings.speculation is None:
        return
    tree = settings.speculation.tree
    length = 1 + len(tree) if tree else settings.speculation.length
    most = min(MOST_LENGTH, settings.seq_len - 1)
    if not 2 <= length <= most:
        raise UserError(
            f"A step of speculation has at least 2 and at most {most} tokens with --seq-len "
            f"{settings.seq_len}, got {length}; change --speculation-length or "
            "--prompt-lookup-num-tokens."
        )
    if tree and settings.quantized:
        raise UserError("Medusa's heads are not quantised with their model; leave --quantize out.")
    others: dict[str, Any] = {
        "--do-sample": settings.samples and not settings.speculation.gives_logits,
        "--padding-side left": settings.padding_side == "left",
        "--on-device-sampling": settings.on_device_sampling,
        f"--batch-size {settings.batch_size}": settings.batch_size > 1,
        "--prefill-chunk": settings.prefill_chunk is not None,
        "--is-continuous-batching": settings.is_continuous_batching,
    }
    refuse_any(
        others,
        "Speculation takes one prompt at a time, whole and padded on the right, and chooses tokens "
        "on the host, greedily where its graph gives no logits, got {}; leave one of them out.",
    )
