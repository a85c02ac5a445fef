"""The lengths for which graphs are built, and NxDI's two rules of which one a call uses."""

import math

import torch


def generate_buckets(min_length: int, max_length: int) -> list[int]:
    """Powers of two from `min_length` below about `max_length`, then `max_length` itself. 640 from
    128 gives [128, 256, 640]: the powers stop below 2^round(log2 640) = 512."""
    if min_length >= max_length:
        return [max_length]
    first = int(math.log2(min_length))
    return [2**exponent for exponent in range(first, round(math.log2(max_length)))] + [max_length]


def context_encoder_bucket(input_ids: torch.Tensor, buckets: list[int], pad_token: int) -> int:
    """Index of the first bucket that holds the longest row without padding ids (NxDI 0.1). A prompt
    that contains the padding id counts too short."""
    length = int((input_ids != pad_token).sum(dim=1).max())
    return next((i for i, bucket in enumerate(buckets) if bucket >= length), len(buckets) - 1)


def token_generation_bucket(position_ids: torch.Tensor, buckets: list[int]) -> int:
    """Index of the first bucket above the largest position (NxDI 0.1)."""
    position = int(position_ids.max())
    return next((i for i, bucket in enumerate(buckets) if bucket > position), len(buckets) - 1)


def bucket_above(length: int, buckets: list[int]) -> int:
    """Index of the first bucket strictly above `length`, or of the largest (NxDI 0.6)."""
    return next((i for i, bucket in enumerate(buckets) if bucket > length), len(buckets) - 1)
