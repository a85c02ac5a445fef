"""The arithmetic of flash decoding that model files import; only the library has the rest."""


def calculate_num_cores_per_group(num_attn_heads: int, num_kv_heads: int, tp_degree: int) -> int:
    """Ranks that share one key-value head: min(tp, query heads) / key-value heads, if whole."""
    ranks = min(tp_degree, num_attn_heads)
    if ranks % num_kv_heads != 0:
        raise AssertionError(
            f"Flash decoding would share {num_kv_heads} key-value heads among {ranks} ranks, "
            "expected a multiple of the heads; leave flash_decoding_enabled off, or choose a "
            "tensor-parallel degree that is one."
        )
    return ranks // num_kv_heads
