"""Several tokens a step: the guesser that the arguments ask for, and how many tokens.

Medusa, EAGLE and trees of tokens are experiments (docs/speculation.md): none of the shipped models
has heads.
"""

from pathlib import Path
from typing import Annotated, Any, Optional

from pydantic import Field, TypeAdapter

from harness.errors import UserError, refuse_any
from harness.settings import (
    DEFAULT_HEADS,
    DEFAULT_LENGTH,
    DRAFT,
    EAGLE,
    FUSED_DRAFT,
    LOOKUP,
    MEDUSA,
    MEDUSA_CANDIDATES,
    Arguments,
    Settings,
    Speculation,
)

MOST_LENGTH = 128  # the kernels' mask of new tokens among themselves: one query a partition
# The likeliest paths by the first head's choice and on, 16 tokens a call with the newest one: one
# pass of the kernels' tiles, and the 63 paths of NxDI's example cost three times as many rows.
DEFAULT_TREE = (
    *((0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (2, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1)),
)
_Node = Annotated[int, Field(ge=0)]
_TOKEN_TREE: TypeAdapter[dict[_Node, list[_Node]]] = TypeAdapter(dict[_Node, list[_Node]])
_Candidate = Annotated[int, Field(ge=0, lt=MEDUSA_CANDIDATES, strict=True)]
_Path = Annotated[list[_Candidate], Field(min_length=1)]
TokenTree = tuple[tuple[int, tuple[int, ...]], ...]
_PATHS: TypeAdapter[list[_Path]] = TypeAdapter(list[_Path])


def asked(args: Arguments) -> Optional[Speculation]:
    """The speculation of the arguments; None for one token a step."""
    lookup, draft = args.prompt_lookup_num_tokens, args.draft_model_path
    if args.medusa:
        return _medusa(args)
    if lookup is not None and draft is not None:
        raise UserError(
            "--prompt-lookup-num-tokens and --draft-model-path name two ways to guess; give one."
        )
    implied = LOOKUP if lookup is not None else DRAFT if draft is not None else None
    if args.enable_fused_speculation or args.enable_eagle_speculation:
        implied = EAGLE if args.enable_eagle_speculation else FUSED_DRAFT
    elif implied == DRAFT and args.speculate in (FUSED_DRAFT, EAGLE):
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
        tree, length = _token_tree(args, args.token_tree_json)
    return Speculation(
        method,
        length,
        draft,
        fused=method in (FUSED_DRAFT, EAGLE),
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
        # a draft has no adapter, and a graph with a draft or with heads gets no numbers
        "--lora-ckpt-path": settings.adapters is not None and settings.speculation.method != LOOKUP,
    }
    refuse_any(
        others,
        "Speculation takes one prompt at a time, whole and padded on the right, and chooses tokens "
        "on the host, greedily where its graph gives no logits, got {}; leave one of them out.",
    )


def _read(source: Path, adapter: TypeAdapter[Any], form: str) -> Any:
    """A tree's file in its form; a UserError names the form."""
    try:
        return adapter.validate_json(source.read_bytes())
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        told = f"Cannot read the tree {source}, expected a JSON {form}: {reason}; mend the file."
        raise UserError(told) from error


def _token_tree(args: Arguments, source: Path) -> tuple[TokenTree, int]:
    """The children of each node that has some, and the number of nodes. UserError unless the nodes
    of a tree count up from 0, level by level."""
    form = 'object of nodes and their children, such as {"0": ["1", "2"], "1": ["3"]}'
    given = _read(source, _TOKEN_TREE, form)
    found = [0]
    for node in found:
        if len(found) <= MOST_LENGTH:  # a circle has no end
            found += given.get(node, [])
    if (
        not 2 <= len(found) <= MOST_LENGTH
        or found != list(range(len(found)))
        or not set(given) <= set(found)
    ):
        raise UserError(
            f"The tree {source} has the nodes {found[:MOST_LENGTH]} from 0 on, level by level, "
            f"expected 0, 1, 2 and so on, at most {MOST_LENGTH} of them, each with one parent; "
            "mend the file."
        )
    if args.speculation_length not in (None, len(found)):
        raise UserError(
            f"--speculation-length must be {len(found)}, the nodes of the tree {source}, got "
            f"{args.speculation_length}; leave it out."
        )
    return tuple((node, tuple(own)) for node, own in sorted(given.items()) if own), len(found)


def _medusa(args: Arguments) -> Speculation:
    """A tree of guesses by heads of the model's own."""
    others = {
        "--speculate": args.speculate not in (None, MEDUSA),
        "--prompt-lookup-num-tokens": args.prompt_lookup_num_tokens is not None,
        "--draft-model-path": args.draft_model_path is not None,
        "--speculation-length": args.speculation_length is not None,
        "--enable-fused-speculation": args.enable_fused_speculation,
        "--enable-eagle-speculation": args.enable_eagle_speculation,
        "--do-sample": bool(args.do_sample),
    }
    refuse_any(others, "Medusa guesses alone, and greedily, got {}, too; leave it out.")
    heads = args.num_medusa_heads or DEFAULT_HEADS
    tree: Any = [path for path in DEFAULT_TREE if len(path) <= heads]
    if args.medusa_tree_json is not None:
        tree = _paths(args.medusa_tree_json, heads)
    asked = args.medusa_speculation_length
    if asked not in (None, 1 + len(tree)):
        raise UserError(
            f"--medusa-speculation-length must be {1 + len(tree)}, the paths of the tree and one, "
            f"got {asked}; leave it out."
        )
    return Speculation(MEDUSA, heads + 1, tree=tuple(map(tuple, tree)))


def _paths(source: Path, heads: int) -> list[list[int]]:
    """The paths of a tree, each with its beginning among them; UserError for anything else."""
    form = f"list of lists of candidates below {MEDUSA_CANDIDATES}, such as [[0], [1], [0, 0]]"
    paths = _read(source, _PATHS, form)
    known: set[tuple[int, ...]] = {tuple(path) for path in paths} | {()}
    torn = [path for path in paths if tuple(path[:-1]) not in known or len(path) > heads]
    if torn or not paths or len(known) <= len(paths):
        raise UserError(
            f"The tree {source} has the paths {torn or paths}, expected some, each of them once, "
            f"at most {heads} long (--num-medusa-heads) and with its beginning in the tree, too; "
            "mend the file."
        )
    return paths
