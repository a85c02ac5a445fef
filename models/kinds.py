"""FAMILIES: what a model_type does otherwise than Llama, and what its checkpoint holds.

It imports the standard library alone: the driver reads this file before torch is imported, and
beside a user's own package of the name `models`.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple, Optional, Tuple


class Scales(NamedTuple):
    """Factors of embeddings, of scores in place of 1 / sqrt(D), of what a layer's halves add to the
    residual stream, and of logits."""

    embedding: float = 1.0
    scores: Optional[float] = None
    residual: float = 1.0
    logits: float = 1.0


def no_scales(config: Any) -> Scales:
    return Scales()


def gemma_scales(config: Any) -> Scales:
    """transformers rounds the embedding's factor to the model's type."""
    import torch  # not where only the table is read

    root = torch.tensor(math.sqrt(config.hidden_size), dtype=config.neuron_config.torch_dtype)
    return Scales(float(root), config.query_pre_attn_scalar**-0.5)


def granite_scales(config: Any) -> Scales:
    return Scales(
        config.embedding_multiplier,
        config.attention_multiplier,
        config.residual_multiplier,
        1.0 / config.logits_scaling,
    )


def no_windows(config: Any, number: int) -> bool:
    return False


def all_windows(config: Any, number: int) -> bool:
    return True


def even_windows(config: Any, number: int) -> bool:
    return number % 2 == 0


def windows_in_a_pattern(config: Any, number: int) -> bool:
    kinds = getattr(config, "layer_types", None)  # of transformers 4.53 and later
    if kinds:
        return bool(kinds[number] == "sliding_attention")
    return (number + 1) % config.sliding_window_pattern > 0


class Family(NamedTuple):
    """What a model_type does otherwise than Llama.

    ``norms``: a checkpoint's names of the RMSNorms before and behind attention, before and behind
    the MLP; None where there is none. ``less_one``: gains are stored less one. ``head_norms``:
    RMSNorms over queries and over keys, of "each" head or of "all" heads together. ``fused``: Q, K
    and V are one tensor, gate and up another. ``windows``: whether a layer, by its number, sees
    ``sliding_window`` tokens only. ``reads``: fields of config.json that count here alone.
    """

    norms: Tuple[Optional[str], ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    less_one: bool = False
    qkv_bias: bool = False
    head_norms: str = ""
    fused: bool = False
    windows: Callable[[Any, int], bool] = no_windows
    scales: Callable[[Any], Scales] = no_scales
    reads: Tuple[str, ...] = ()


_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_CAPS = "final_logit_softcapping", "attn_logit_softcapping"
_GEMMA = Family(_FOUR_NORMS, less_one=True, scales=gemma_scales)
FAMILIES = {
    "llama": Family(),
    "mistral": Family(windows=all_windows),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(head_norms="each"),
    "gemma2": _GEMMA._replace(windows=even_windows, reads=_CAPS),
    "gemma3_text": _GEMMA._replace(
        windows=windows_in_a_pattern, head_norms="each", reads=(_CAPS[0], "rope_local_base_freq")
    ),
    "granite": Family(scales=granite_scales),
    "olmo2": Family((None, _FOUR_NORMS[1], None, _FOUR_NORMS[3]), head_norms="all"),
    "phi3": Family(fused=True, windows=all_windows, reads=("partial_rotary_factor",)),
    "smollm3": Family(reads=("no_rope_layers",)),
}
# A checkpoint's norms become these: before attention and the MLP, and behind them.
PLACES = "input_layernorm", "self_attn.post_norm", "post_attention_layernorm", "mlp.post_norm"
