"""Helpers of the parallel layers (names of NxD's parallel_layers.utils)."""

from collections.abc import Sequence
from typing import Any

import torch

_MODEL_PARALLEL_ATTRIBUTES = {
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
    "num_partitions": 1,
}


def divide(numerator: int, denominator: int) -> int:
    """The quotient. AssertionError, which names both numbers, where a remainder is left."""
    if numerator % denominator != 0:
        raise AssertionError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


def get_padding_length(numerator: int, denominator: int) -> int:
    """The amount that brings `numerator` to a multiple of `denominator`."""
    return -numerator % denominator


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int, num_partitions: int
) -> None:
    """Tag a parameter, once, with how the checkpoint loader slices it."""
    if any(hasattr(tensor, name) for name in _MODEL_PARALLEL_ATTRIBUTES):
        raise AssertionError(
            "A parameter gets tensor-parallel tags twice, expected once; tag it where it is made."
        )
    tensor.tensor_model_parallel = is_parallel
    tensor.partition_dim = dim
    tensor.partition_stride = stride
    tensor.num_partitions = num_partitions


def copy_tensor_model_parallel_attributes(
    destination_tensor: torch.Tensor, source_tensor: torch.Tensor
) -> None:
    """Copy the slicing tags of `source_tensor` to `destination_tensor`."""
    for name in _MODEL_PARALLEL_ATTRIBUTES:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def cast_if_autocast_enabled(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors unchanged: autocast is never on here."""
    return tensors


def verify_casted_dtype(value: Any) -> None:
    """Do nothing: autocast is never on here."""
    del value


def is_torch_version_greater_than_2() -> bool:
    return int(torch.__version__.split(".")[0]) >= 2


class EmbeddingUtility:
    """The rows of a vocabulary-sharded embedding that a rank holds."""

    @staticmethod
    def range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """The first row of `rank`, and the row after its last."""
        del world_size
        start = rank * per_partition_vocab_size
        return start, start + per_partition_vocab_size


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """Heads to add so that `tp_degree` divides the count."""
    return get_padding_length(n_head, tp_degree)


def model_parallel_xla_manual_seed(seed: int) -> None:
    """Do nothing: a rank draws no random numbers of its own (rank 0 draws for all)."""
    del seed
