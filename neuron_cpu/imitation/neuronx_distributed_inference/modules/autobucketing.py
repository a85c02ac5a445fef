"""The lengths for which graphs are built, and NxDI's two rules of which one a call uses."""

import math
from typing import List, Tuple

import torch


def generate_buckets(min_length: int, max_length: int) -> List[int]:
    """Powers of two from `min_length` below about `max_length`, then `max_length` itself. 640 from
    128 gives [128, 256, 640]: the powers stop below 2^round(log2 640) = 512."""
    if min_length >= max_length:
        return [max_length]
    first = int(math.log2(min_length))
    last = round(math.log2(max_length))
    return [2**exponent for exponent in range(first, last)] + [max_length]


def context_encoder_bucket(input_ids: torch.Tensor, buckets: List[int], pad_token: int) -> int:
    """Index of the first bucket that holds the longest row without padding ids (NxDI 0.1). A prompt
    that contains the padding id counts too short."""
    length = int((input_ids != pad_token).sum(dim=1).max())
    return next((i for i, bucket in enumerate(buckets) if bucket >= length), len(buckets) - 1)


def token_generation_bucket(position_ids: torch.Tensor, buckets: List[int]) -> int:
    """Index of the first bucket above the largest position (NxDI 0.1)."""
    position = int(position_ids.max())
    return next((i for i, bucket in enumerate(buckets) if bucket > position), len(buckets) - 1)


def bucket_above(length: int, buckets: List[int]) -> int:
    """Index of the first bucket strictly above `length`, or of the largest (NxDI 0.6)."""
    return next((i for i, bucket in enumerate(buckets) if bucket > length), len(buckets) - 1)


# -- two dimensions: new tokens, and cached ones that their graph reads ----------------------------

Pair = List[int]


def prefix_caching_buckets(
    prefill: List[int], prefix: List[int], is_context_encode: bool = True
) -> List[Pair]:
    """[new, cached] of every graph: pairs of a prefill and a prefix length, 0 first. Decode graphs
    have [1, length]."""
    if not is_context_encode:
        return [[1, length] for length in prefill]
    return [[new, cached] for new in prefill for cached in [0, *prefix]]


def prefix_caching_bucket(queries: int, computed: int, buckets: List[Pair]) -> Tuple[Pair, int]:
    """The bucket for `computed` cached and `queries` new tokens, and the tokens computed again.

    A graph with room computes some cached tokens again. AssertionError where no bucket is large
    enough, as in NxDI.
    """
    prefills = sorted({new for new, _ in buckets})
    prefixes = sorted({cached for _, cached in buckets})
    if 256 < queries + computed <= 512 and 512 in prefills:
        return [512, 0], computed
    prefill = next((new for new in prefills if new >= queries), None)
    if prefill is None:
        raise AssertionError(
            f"A prompt has {queries} tokens that are not cached, expected at most {prefills[-1]}, "
            "the largest context-encoding bucket; compile with a larger one."
        )
    again = min(computed, prefill - queries)
    prefix = next((cached for cached in prefixes if cached >= computed - again), None)
    if prefix is None:
        raise AssertionError(
            f"Prefix length {computed - again} of a prompt exceeds the largest prefix bucket, "
            f"expected at most {prefixes[-1]}; compile with larger prefix_buckets."
        )
    return [prefill, prefix], again
