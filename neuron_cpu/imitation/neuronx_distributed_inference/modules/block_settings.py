"""What a configuration with a cache of blocks has to be like."""

import math
from typing import Any, List, Optional, Tuple

from ..contract import ENVIRONMENT_VARIABLE

_OTHERS = ("speculation_length", "sequence_parallel_enabled", "k_cache_transposed")


def refuse_blocks(config: Any) -> None:
    """NotImplementedError for what the version lacks or is not modelled; AssertionError for blocks
    of sizes that no graph can have."""
    asked = [
        name
        for name in ("is_block_kv_layout", "is_prefix_caching", "is_chunked_prefill")
        if getattr(config, name, False)
    ]
    if not asked:
        return
    if not config.contract.reads_blocks:
        raise NotImplementedError(
            f"{asked[0]} needs NxDI 0.4 or later, whose graphs read caches through block tables, "
            f"got {config.contract.version}; set {ENVIRONMENT_VARIABLE} to 0.4 or leave it out."
        )
    wrong = _misfit(config, asked) or _sizes(config)
    if wrong is not None:
        raise AssertionError(f"{asked[0]} takes {wrong[0]}, got {wrong[1]}; change that.")
    for name in _OTHERS:
        if getattr(config, name, False):
            raise NotImplementedError(
                f"{asked[0]} meets {name}={getattr(config, name)!r}, expected it to be off, "
                "because neuron_cpu does not model them together; leave one of them out."
            )


def _misfit(config: Any, asked: List[str]) -> Optional[Tuple[str, str]]:
    """What should be otherwise, and what it is: settings that belong together."""
    chunks = config.chunked_prefill_config
    if len(asked) != 2 or asked[0] != "is_block_kv_layout":
        one = "is_block_kv_layout with one of is_prefix_caching and chunked_prefill_config"
        return one, " and ".join(asked)
    if config.padding_side != "right":
        return "padding_side 'right'", repr(config.padding_side)
    if chunks is None:
        return None if config.ctx_batch_size == 1 else ("ctx_batch_size 1", config.ctx_batch_size)
    if chunks.max_num_seqs < 1:
        return "a chunked_prefill_config with max_num_seqs of at least 1", chunks.max_num_seqs
    rows = chunks.max_num_seqs if chunks.tkg_model_enabled else 1
    batch = config.ctx_batch_size, config.tkg_batch_size
    if batch != (1, rows):
        return f"ctx_batch_size 1 and a batch of {rows} sequences", f"{batch[0]} and {batch[1]}"
    if chunks.kernel_kv_tile_size % config.pa_block_size:
        return "a kernel_kv_tile_size of whole blocks", chunks.kernel_kv_tile_size
    if config.max_context_length % chunks.kernel_q_tile_size:
        most = config.max_context_length
        return f"a kernel_q_tile_size that divides max_context_length {most}", (
            chunks.kernel_q_tile_size
        )
    return None


def _sizes(config: Any) -> Optional[Tuple[str, str]]:
    """The same of the blocks' size and number."""
    block = config.pa_block_size
    if block < 1 or block & (block - 1):
        return "a pa_block_size that is a power of two", str(block)
    for name in ("prefix_buckets", "token_generation_buckets"):
        lengths = getattr(config, name) or []
        if any(length % block for length in lengths):
            return f"{name} of whole blocks of {block}", str(lengths)
    if config.max_length % block or config.max_context_length % block:
        given = f"{config.max_length} and {config.max_context_length}"
        return f"max_length and max_context_length of whole blocks of {block}", given
    least = math.ceil(config.max_length / block) + int(config.is_chunked_prefill)
    if config.pa_num_blocks < least:
        return f"pa_num_blocks of at least {least}, one longest sequence", str(config.pa_num_blocks)
    return None
