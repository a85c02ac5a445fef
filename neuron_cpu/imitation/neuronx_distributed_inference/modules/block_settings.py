"""Checks a configuration with a cache of blocks."""

import math
from typing import Any, List, Optional, Tuple

# The last one gets no numbers of adapters there in NxDI 0.4 to 0.6, and ends in an error.
_OTHERS = ("speculation_length", "sequence_parallel_enabled", "k_cache_transposed", "lora_config")


def refuse_blocks(config: Any) -> None:
    """NotImplementedError for a feature that is not modelled.
    AssertionError for blocks of sizes that no graph can have."""
    asked = [
        name for name in ("is_block_kv_layout", "is_prefix_caching") if getattr(config, name, False)
    ]
    if not asked:
        return
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
    """Settings that contradict each other: the expected value, and the value."""
    if len(asked) != 2:
        return "is_block_kv_layout with is_prefix_caching", f"{asked[0]} alone"
    if config.padding_side != "right":
        return "padding_side 'right'", repr(config.padding_side)
    return None if config.ctx_batch_size == 1 else ("ctx_batch_size 1", config.ctx_batch_size)


def _sizes(config: Any) -> Optional[Tuple[str, str]]:
    """Sizes and numbers of blocks that contradict others, in `_misfit`'s form."""
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
    least = math.ceil(config.max_length / block)
    if config.pa_num_blocks < least:
        return f"pa_num_blocks of at least {least}, one longest sequence", str(config.pa_num_blocks)
    return None
