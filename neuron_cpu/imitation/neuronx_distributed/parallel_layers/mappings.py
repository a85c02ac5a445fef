"""Collectives between the tensor-parallel ranks (names of NxD's parallel_layers.mappings).

Every function takes this rank's tensor and an optional `process_group` (default: the running
thread's) and returns a new tensor; with one rank the input itself comes back. There are no
gradients: the stand-in is for inference. Reductions add in rank order in the tensor's own dtype,
so a bf16 all-reduce rounds after every addition, as the device does.
"""

import warnings
from collections.abc import Sequence

import torch
import torch_xla.core.xla_model as xm

from neuron_cpu.runtime.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    REDUCE_SCATTER,
    Collective,
)
from neuron_cpu.runtime.graph import collective
from neuron_cpu.runtime.ranks import Group, is_tracing

from . import parallel_state
from .utils import divide


def _group(process_group: Group | Sequence[Sequence[int]] | None) -> Group:
    """The group given; the running thread's for None and for its replica groups.

    Replica groups are what `get_tensor_model_parallel_group(as_list=True)` returns. ValueError for
    others: only one group exists.
    """
    if isinstance(process_group, Group):
        return process_group
    group = parallel_state.get_tensor_model_parallel_group()
    expected = parallel_state.get_tensor_model_parallel_group(as_list=True)
    named = expected if process_group is None else [list(ranks) for ranks in process_group]
    if named != expected:
        raise ValueError(
            f"process_group is {process_group}, expected {expected}, the only replica groups that "
            "exist here; leave process_group out."
        )
    return group


def _met(
    kind: str,
    tensor: torch.Tensor,
    process_group: Group | None,
    computation: str = xm.REDUCE_SUM,
    dim: int = 0,
) -> torch.Tensor:
    """One collective; `tensor` itself where one rank is alone."""
    group = _group(process_group)
    if group.size() == 1:
        return tensor
    return collective(Collective(kind, reduce=computation, dim=dim), tensor, group)


def _reduce(
    input_: torch.Tensor, computation: str = xm.REDUCE_SUM, process_group: Group | None = None
) -> torch.Tensor:
    """All-reduce by `computation`."""
    return _met(ALL_REDUCE, input_, process_group, computation)


def _broadcast(input_: torch.Tensor, process_group: Group | None = None) -> torch.Tensor:
    """Rank 0's tensor on every rank."""
    return _met(BROADCAST, input_, process_group)


def _gather_along_dim(
    x: torch.Tensor, partition_dim: int, process_group: Group | None = None
) -> torch.Tensor:
    """All-gather: the ranks' tensors concatenated in rank order along `partition_dim`."""
    return _met(ALL_GATHER, x, process_group, dim=partition_dim)


def _reduce_scatter_along_dim(
    x: torch.Tensor,
    partition_dim: int,
    computation: str = xm.REDUCE_SUM,
    process_group: Group | None = None,
    tile_cc: bool = False,
) -> torch.Tensor:
    """Reduce over the ranks by `computation`; each rank keeps its slice along `partition_dim`."""
    del tile_cc  # the device may do it in pieces
    divide(x.shape[partition_dim], _group(process_group).size())
    return _met(REDUCE_SCATTER, x, process_group, computation, partition_dim).contiguous()


def _split_along_dim(
    input_: torch.Tensor, partition_dim: int, process_group: Group | None = None
) -> torch.Tensor:
    """Rank 0's slice along `partition_dim` on every rank: one graph serves all ranks."""
    group = _group(process_group)
    if group.size() == 1:
        return input_
    warn_of_constant_rank(
        "A scatter", "_reduce_scatter_along_dim with REDUCE_MAX on equal tensors, or an SPMDRank"
    )
    width = divide(input_.shape[partition_dim], group.size())
    return input_.narrow(partition_dim, 0, width).contiguous()


def warn_of_constant_rank(what: str, instead: str) -> None:
    """Warn, while a model is traced, that `what` takes the rank for a constant. The warning names
    the caller's caller."""
    if is_tracing():
        warnings.warn(
            f"{what} by the group's own rank is traced: every rank shares one graph, traced as "
            f"rank 0, so each would keep rank 0's slice. Use {instead}.",
            RuntimeWarning,
            stacklevel=4,
        )


def _gather_along_first_dim(x: torch.Tensor, process_group: Group | None = None) -> torch.Tensor:
    return _gather_along_dim(x, 0, process_group)


def copy_to_tensor_model_parallel_region(
    input_: torch.Tensor, process_group: Group | None = None
) -> torch.Tensor:
    """The input itself (its gradient would be an all-reduce)."""
    del process_group
    return input_


def reduce_from_tensor_model_parallel_region(
    input_: torch.Tensor, process_group: Group | None = None
) -> torch.Tensor:
    """The sum of the ranks' tensors, on every rank."""
    return _reduce(input_, process_group=process_group)


def gather_from_tensor_model_parallel_region(
    input_: torch.Tensor, process_group: Group | None = None
) -> torch.Tensor:
    """The ranks' tensors concatenated along the last dimension, on every rank."""
    return _gather_along_dim(input_, -1, process_group)


def gather_from_tensor_model_parallel_region_with_dim(
    input_: torch.Tensor, gather_dim: int, process_group: Group | None = None
) -> torch.Tensor:
    """The ranks' tensors concatenated along `gather_dim`, on every rank."""
    return _gather_along_dim(input_, gather_dim, process_group)


def scatter_to_tensor_model_parallel_region(
    input_: torch.Tensor, process_group: Group | None = None
) -> torch.Tensor:
    """This rank's slice of the last dimension; see `_split_along_dim`."""
    return _split_along_dim(input_, -1, process_group)


def scatter_input_channels_to_tensor_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """A slice of dimension 1, a convolution's channels; see `_split_along_dim`."""
    return _split_along_dim(input_, 1)


def scatter_to_sequence_parallel_region(
    input_: torch.Tensor, sequence_dimension: int = 0, process_group: Group | None = None
) -> torch.Tensor:
    """A slice of the sequence; see `_split_along_dim`."""
    return _split_along_dim(input_, sequence_dimension, process_group)


def gather_from_sequence_parallel_region(
    input_: torch.Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: Group | None = None,
    tile_cc: bool = False,
) -> torch.Tensor:
    """The whole sequence from the ranks' slices. Two flags concern gradients and tiling only."""
    del to_model_parallel, tile_cc
    return _gather_along_dim(input_, sequence_dimension, process_group)


def reduce_scatter_to_sequence_parallel_region(
    input_: torch.Tensor,
    sequence_dimension: int = 0,
    process_group: Group | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Sum over the ranks, in `dtype` where given; a rank keeps its slice of the sequence."""
    original = input_.dtype
    summed = _reduce_scatter_along_dim(
        input_.to(dtype or original), sequence_dimension, process_group=process_group
    )
    return summed.to(original)


def reduce_scatter_to_sequence_parallel_region_tiled(
    input_: torch.Tensor, sequence_dimension: int = 0, process_group: Group | None = None
) -> torch.Tensor:
    """The same sum. A device cuts it into pieces, beside computation."""
    return reduce_scatter_to_sequence_parallel_region(
        input_, sequence_dimension, process_group=process_group
    )
