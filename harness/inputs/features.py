"""Features that several options describe: adapters, a cache of blocks, a kernel in any model,
several tokens a step. Medusa, EAGLE and trees of tokens are experiments (docs/speculation.md): none
of the shipped models has heads.
"""

import ast
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from harness.errors import UserError, at_most, refuse_any, words_of
from harness.settings import (
    BLOCK,
    DEFAULT_HEADS,
    DEFAULT_LENGTH,
    DRAFT,
    EAGLE,
    FUSED_DRAFT,
    LOOKUP,
    MEDUSA,
    MEDUSA_CANDIDATES,
    PLACES,
    Adapters,
    Arguments,
    Blocks,
    Settings,
    Speculation,
    Swap,
)
from neuron_cpu.sandbox import foreign
from neuron_cpu.sandbox.neighbours import tree

BASE = "0"  # NxDI's id of the model without an adapter
_CONFIG = "adapter_config.json"
SHORT = 128  # tokens of the smaller prefill graph, for the rest behind a prefix
CHUNK = 256  # tokens that a call takes of all sequences together
FLAGS = (
    *("--is-block-kv-layout", "--is-prefix-caching", "--is-chunked-prefill"),
    *("--pa-block-size", "--pa-num-blocks", "--prefix-buckets"),
    *("--kernel-q-tile-size", "--kernel-kv-tile-size"),
)
LONGEST_EAGER = 4096  # tokens whose scores in fp32 PyTorch keeps as a whole


def adapters(args: Arguments) -> Adapters | None:
    """The adapters of the arguments, each folder checked; None without adapters."""
    if args.lora_ckpt_path is None:
        return None
    paths: dict[str, Path] = {}
    for entry in args.lora_ckpt_path:
        name, _, folder = (part.strip() for part in entry.partition(":"))
        path = Path(folder).expanduser().absolute()
        if not folder or not name or name == BASE or name in paths:
            raise UserError(
                f"--lora-ckpt-path {entry!r} must be ID:FOLDER with a name of its own, not {BASE}; "
                f"write mine:{folder or entry}."
            )
        if not (path / _CONFIG).is_file():
            raise UserError(f"The adapter {path} has no {_CONFIG}; name a folder that PEFT saved.")
        paths[name] = path
    if args.adapter_id not in (None, BASE, *paths):
        raise UserError(
            f"--adapter-id {args.adapter_id!r} is none of {', '.join(paths)}; name one of them."
        )
    return Adapters(tuple(paths.items()), args.adapter_id or BASE, args.max_lora_rank)


def blocks(args: Arguments) -> Blocks | None:
    """The cache of blocks of the arguments; None for a cache of lines."""
    prefix, chunks = bool(args.is_prefix_caching), bool(args.is_chunked_prefill)
    given = [flag for flag in FLAGS if getattr(args, flag[2:].replace("-", "_")) is not None]
    if not given:
        return None
    if prefix == chunks:
        raise UserError(
            f"{given[0]} needs --is-prefix-caching or --is-chunked-prefill, and one of them alone; "
            f"got {'both' if prefix else 'neither'}."
        )
    for flag in ("--kernel-q-tile-size", "--kernel-kv-tile-size"):
        if flag in given and prefix:
            raise UserError(f"{flag} needs --is-chunked-prefill, whose tiles have that size.")
    if "--prefix-buckets" in given and chunks:
        raise UserError("--prefix-buckets needs --is-prefix-caching; leave it out.")
    size = args.pa_block_size or BLOCK
    if size & (size - 1):
        raise UserError(f"--pa-block-size must be a power of two, got {size}; write {BLOCK}.")
    return Blocks(
        size=size,
        chunks=chunks,
        number=args.pa_num_blocks,
        prefixes=tuple(sorted(set(args.prefix_buckets or ()))),
    )


def lengths(args: Arguments, found: Blocks, seq_len: int) -> dict[str, Any]:
    """The settings' lengths, with defaults: graphs of a chunk, or for the rest behind a prefix.

    A prompt leaves a block to the answer, which also keeps NxDI from computing prompts of 257 to
    512 tokens whole, as it does where a graph has just 512.
    """
    longest = min(CHUNK, seq_len) if found.chunks else max(found.size, seq_len - found.size)
    longest = args.max_context_length or longest
    buckets = args.context_encoding_buckets
    if buckets is None and args.enable_bucketing and not found.chunks:
        buckets = sorted({min(SHORT, longest), longest})
    # tiles of all queries: attention passes each tile of keys once with all of a chunk's
    tiles = args.kernel_q_tile_size or longest, args.kernel_kv_tile_size or 1024
    return {
        "max_context_length": longest,
        "context_encoding_buckets": buckets,
        "blocks": replace(found, tiles=tiles),
    }


def check_blocks(settings: Settings) -> None:
    """Refuse with a UserError sizes that are no whole blocks, and options that exclude blocks."""
    found = settings.blocks
    if found is None:
        return
    lengths = {
        "--seq-len": [settings.seq_len],
        "--max-context-length": [settings.max_context_length],
        "--prefix-buckets": list(found.prefixes),
        "--token-generation-buckets": settings.token_generation_buckets or [],
    }
    for flag, values in lengths.items():
        for value in values:
            if value % found.size:
                raise UserError(
                    f"{flag} must be whole blocks of {found.size} tokens, got {value}; change it, "
                    "or --pa-block-size."
                )
    longest = max(found.prefixes, default=0)
    at_most("--prefix-buckets", longest, settings.max_context_length, ", --max-context-length")
    if not found.chunks and settings.seq_len < 128:
        raise UserError(
            f"--seq-len must be at least 128 with --is-prefix-caching, as NxDI reads a sequence in "
            f"128 parts, got {settings.seq_len}; raise it."
        )
    least = settings.seq_len // found.size + (1 if found.chunks else 0)
    if found.number is not None and found.number < least:
        raise UserError(
            f"--pa-num-blocks must be at least {least}, the blocks of one answer of --seq-len "
            f"{settings.seq_len}, got {found.number}; write {least}."
        )
    if found.chunks and (
        settings.max_context_length % found.tiles[0] or found.tiles[1] % math.lcm(128, found.size)
    ):
        raise UserError(
            f"--kernel-q-tile-size must divide --max-context-length {settings.max_context_length} "
            f"and --kernel-kv-tile-size be whole blocks of {found.size} and a multiple of 128, got "
            f"{found.tiles[0]} and {found.tiles[1]}."
        )
    if found.chunks and settings.max_context_length <= settings.batch_size:
        raise UserError(
            f"--max-context-length is a chunk and must be above --batch-size "
            f"{settings.batch_size}, so that prompts get on beside the steps of all, got "
            f"{settings.max_context_length}."
        )
    others = {
        "--padding-side left": settings.padding_side == "left",
        "--async-mode": settings.async_mode,
        "--sequence-parallel-enabled": settings.sequence_parallel_enabled,
        "speculation": settings.speculation is not None,
        "--lora-ckpt-path": found.chunks and settings.adapters is not None,
    }
    refuse_any(others, "A cache of blocks does not go with {}; leave one of them out.")


def swap(args: Arguments) -> Swap | None:
    """The swap of the arguments; None in other modes."""
    if args.mode != "swap":
        return None
    if args.kernel is None or args.at is None:
        raise UserError(
            "--mode swap needs --kernel FILE:NAME and --at, what it replaces: "
            f"{', '.join(PLACES)}; give both."
        )
    path, colon, name = args.kernel.rpartition(":")
    if not colon or not name.isidentifier():
        file = args.kernel if args.kernel.endswith(".py") else f"{args.kernel}.py"
        names = [one.name for one in ast.walk(tree(Path(file))) if isinstance(one, ast.FunctionDef)]
        raise UserError(
            f"--kernel must be FILE:NAME, got {args.kernel!r}; write {file}:{[*names, 'NAME'][0]}."
        )
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(
            f"The kernel's file {path} does not exist, expected a .py file; "
            f"{foreign.meant(Path(path))}."
        )
    return Swap(Path(path).resolve(), name, args.at, args.layers, args.least_cosine)


def check_swap(settings: Settings) -> None:
    """Refuse with a UserError options that the mode would ignore."""
    if settings.swap is None:
        return
    others: dict[str, Any] = {
        "--enable-nki": settings.enable_nki,
        "--tp-degree": settings.tp_degree not in (None, 1),
        "--padding-side left": settings.padding_side == "left",
        "--compiled-model-path": settings.compiled_model_path is not None,
    }
    refuse_any(
        others,
        "--mode swap runs one module on one core, its rows padded on the right, got {}; leave it "
        "out.",
    )


MOST_LENGTH = 128  # the kernels' mask of new tokens among themselves: one query a partition
# The likeliest paths, a digit for each head's choice, 16 tokens a call with the newest one: a pass
# of the kernels' tiles, and the 63 paths of NxDI's example cost three times as many rows.
DEFAULT_TREE = "0 1 2 3 00 01 02 10 20 000 001 010 100 0000 0001"
_Node = Annotated[int, Field(ge=0)]
_TOKEN_TREE: TypeAdapter[dict[_Node, list[_Node]]] = TypeAdapter(dict[_Node, list[_Node]])
_Candidate = Annotated[int, Field(ge=0, lt=MEDUSA_CANDIDATES, strict=True)]
_Path = Annotated[list[_Candidate], Field(min_length=1)]
TokenTree = tuple[tuple[int, tuple[int, ...]], ...]
_PATHS: TypeAdapter[list[_Path]] = TypeAdapter(list[_Path])


def speculation(args: Arguments) -> Speculation | None:
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
        raise UserError(
            f"--speculate {method} is given with arguments of --speculate {implied}; leave one out."
        )
    if method != LOOKUP and draft is None:
        raise UserError(f"Speculation ({method}) needs --draft-model-path, the model that guesses.")
    if method != LOOKUP and lookup is not None:
        raise UserError(
            f"--prompt-lookup-num-tokens does not go with {method} speculation; leave it out."
        )
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


def check_speculation(settings: Settings) -> None:
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


def _read_tree(source: Path, adapter: TypeAdapter[Any], form: str) -> Any:
    """A tree's file in its form; a UserError names the form."""
    try:
        return adapter.validate_json(source.read_bytes())
    except (OSError, ValueError) as error:
        reason = words_of(error)[:120]
        told = f"Cannot read the tree {source}, expected a JSON {form}: {reason}; mend the file."
        raise UserError(told) from error


def _token_tree(args: Arguments, source: Path) -> tuple[TokenTree, int]:
    """The children of each node that has some, and the number of nodes. UserError unless the nodes
    of a tree count up from 0, level by level."""
    form = 'object of nodes and their children, such as {"0": ["1", "2"], "1": ["3"]}'
    given = _read_tree(source, _TOKEN_TREE, form)
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
    tree: Any = [tuple(map(int, path)) for path in DEFAULT_TREE.split() if len(path) <= heads]
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
    paths = _read_tree(source, _PATHS, form)
    known: set[tuple[int, ...]] = {tuple(path) for path in paths} | {()}
    torn = [path for path in paths if tuple(path[:-1]) not in known or len(path) > heads]
    if torn or not paths or len(known) <= len(paths):
        raise UserError(
            f"The tree {source} has the paths {torn or paths}, expected some, each of them once, "
            f"at most {heads} long (--num-medusa-heads) and with its beginning in the tree, too; "
            "mend the file."
        )
    return paths
