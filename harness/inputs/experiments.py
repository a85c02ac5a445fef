"""The command line's arguments of guesses that need heads: Medusa, EAGLE and trees of tokens.

Experiments (docs/speculation.md): none of the shipped models has heads. Names are NxDI's
(inference_demo.py).
"""

import argparse
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from harness.errors import UserError, refuse_any
from harness.settings import MEDUSA_CANDIDATES, Speculation

EAGLE, MEDUSA = "eagle", "medusa"
_MEDUSA_FLAGS = (
    *("--is-medusa", "--num-medusa-heads", "--medusa-tree-json"),
    "--medusa-speculation-length",
)
MEDUSA_FILE = "medusa_heads.pt"
DEFAULT_HEADS = 4
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


def check_flags(args: argparse.Namespace) -> None:
    """Refuse flags of heads without the option that uses heads."""
    for flag in _MEDUSA_FLAGS:
        if getattr(args, flag[2:].replace("-", "_")):
            raise UserError(f"{flag} needs --is-medusa; give both.")
    if not (args.enable_eagle_speculation or args.speculate == EAGLE):
        for flag in ("--enable-eagle-draft-input-norm", "--token-tree-json"):
            if getattr(args, flag[2:].replace("-", "_")):
                raise UserError(f"{flag} needs --enable-eagle-speculation.")


def _read(source: Path, adapter: TypeAdapter[Any], form: str) -> Any:
    """A tree's file in its form; a UserError names the form."""
    try:
        return adapter.validate_json(source.read_bytes())
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        told = f"Cannot read the tree {source}, expected a JSON {form}: {reason}; mend the file."
        raise UserError(told) from error


def token_tree(args: argparse.Namespace, most: int) -> tuple[TokenTree, int]:
    """The children of each node that has some, and the number of nodes. UserError unless the nodes
    of a tree count up from 0, level by level."""
    source = args.token_tree_json
    form = 'object of nodes and their children, such as {"0": ["1", "2"], "1": ["3"]}'
    given = _read(source, _TOKEN_TREE, form)
    found = [0]
    for node in found:
        if len(found) <= most:  # a circle has no end
            found += given.get(node, [])
    if (
        not 2 <= len(found) <= most
        or found != list(range(len(found)))
        or not set(given) <= set(found)
    ):
        raise UserError(
            f"The tree {source} has the nodes {found[:most]} from 0 on, level by level, "
            f"expected 0, 1, 2 and so on, at most {most} of them, each with one parent; "
            "mend the file."
        )
    if args.speculation_length not in (None, len(found)):
        raise UserError(
            f"--speculation-length must be {len(found)}, the nodes of the tree {source}, got "
            f"{args.speculation_length}; leave it out."
        )
    return tuple((node, tuple(own)) for node, own in sorted(given.items()) if own), len(found)


def medusa(args: argparse.Namespace) -> Speculation:
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
        tree = _read_tree(args.medusa_tree_json, heads)
    asked = args.medusa_speculation_length
    if asked not in (None, 1 + len(tree)):
        raise UserError(
            f"--medusa-speculation-length must be {1 + len(tree)}, the paths of the tree and one, "
            f"got {asked}; leave it out."
        )
    return Speculation(MEDUSA, heads + 1, tree=tuple(map(tuple, tree)))


def _read_tree(source: Path, heads: int) -> list[list[int]]:
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
