"""Features that several options describe: adapters, a cache of blocks, a kernel in any model."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from harness.errors import UserError, refuse_any
from harness.settings import BLOCK, PLACES, Adapters, Arguments, Blocks, Settings, Swap

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


def adapters(args: Arguments) -> Optional[Adapters]:
    """The adapters of the arguments, each folder checked; None without adapters."""
    if args.lora_ckpt_path is None:
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


def blocks(args: Arguments) -> Optional[Blocks]:
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
        raise UserError(f"--pa-block-size must be a power of two, got {size}.")
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
    if found.prefixes and found.prefixes[-1] > settings.max_context_length:
        raise UserError(
            f"--prefix-buckets must be at most --max-context-length "
            f"{settings.max_context_length}, got {found.prefixes[-1]}."
        )
    if not found.chunks and settings.seq_len < 128:
        raise UserError(
            f"--seq-len must be at least 128 with --is-prefix-caching, as NxDI reads a sequence in "
            f"128 parts, got {settings.seq_len}; raise it."
        )
    least = settings.seq_len // found.size + (1 if found.chunks else 0)
    if found.number is not None and found.number < least:
        raise UserError(
            f"--pa-num-blocks must be at least {least}, the blocks of one answer of --seq-len "
            f"{settings.seq_len}, got {found.number}."
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


def swap(args: Arguments) -> Optional[Swap]:
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
        raise UserError(f"--kernel must be FILE:NAME, got {args.kernel!r}; add ':' and its name.")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(
            f"The kernel's file {path} does not exist, expected a .py file; correct it."
        )
    return Swap(Path(path).resolve(), name, args.at, args.layers, args.least_cosine)


def check_swap(settings: Settings) -> None:
    """Refuse with a UserError options that the mode would ignore."""
    if settings.swap is None:
        return
    if not -1 <= settings.swap.least_cosine <= 1:
        raise UserError(
            f"--least-cosine must be between -1 and 1, got {settings.swap.least_cosine:g}."
        )
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
