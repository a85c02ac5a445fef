"""Arithmetic of flash decoding."""

from __future__ import annotations

from neuronx_distributed.parallel_layers.utils import divide


def calculate_num_cores_per_group(num_attn_heads: int, num_kv_heads: int, tp_degree: int) -> int:
    """Ranks that share one key-value head: min(tp, query heads) / key-value heads, if whole."""
    return divide(min(tp_degree, num_attn_heads), num_kv_heads)
