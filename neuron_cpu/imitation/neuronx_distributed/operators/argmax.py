"""Arg-maximum of a tensor whose `gather_dim` is sharded across the ranks."""

from typing import Optional

import torch

from neuron_cpu.runtime.ranks import Group

from ..parallel_layers import parallel_state
from ..parallel_layers.mappings import _gather_along_dim


def argmax(
    tensor: torch.Tensor,
    dim: int,
    gather_dim: int,
    keepdim: bool = False,
    process_group: Optional[Group] = None,
) -> torch.Tensor:
    """Global indices (int64) of the maxima along `dim`; the first one wins a tie.

    `tensor` is this rank's shard. Where `dim` is not the sharded one, each rank's result is local
    and gathered along `gather_dim`.
    """
    group = process_group or parallel_state.get_tensor_model_parallel_group()
    if dim % tensor.ndim != gather_dim % tensor.ndim:
        local = torch.argmax(tensor, dim=dim, keepdim=True)
        gathered = _gather_along_dim(local, gather_dim, group)
        return gathered if keepdim else gathered.squeeze(dim)
    values, indices = torch.max(tensor, dim=dim, keepdim=True)
    values = _gather_along_dim(values, dim, group)  # one column a rank
    indices = _gather_along_dim(indices, dim, group)
    winner = torch.argmax(values, dim=dim, keepdim=True)
    result = torch.gather(indices, dim, winner) + winner * tensor.shape[dim]
    return result if keepdim else result.squeeze(dim)
