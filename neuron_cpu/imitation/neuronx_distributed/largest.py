"""The largest elements of a tensor that is sharded along `gather_dim` (NxD's operators)."""

import torch
from torch_neuronx.xla_impl.ops import TopK

from neuron_cpu.runtime.ranks import Group

from .parallel_layers import parallel_state
from .parallel_layers.mappings import _gather_along_dim


def argmax(
    tensor: torch.Tensor,
    dim: int,
    gather_dim: int,
    keepdim: bool = False,
    process_group: Group | None = None,
) -> torch.Tensor:
    """Global indices (int64) of the maxima along `dim`; a tie goes to the first index.

    `tensor` is this rank's shard. Where `dim` is not sharded, a rank's results are local, and the
    ranks' results are gathered along `gather_dim`.
    """
    group = process_group or parallel_state.get_tensor_model_parallel_group()
    if dim % tensor.ndim != gather_dim % tensor.ndim:
        gathered = _gather_along_dim(torch.argmax(tensor, dim=dim, keepdim=True), gather_dim, group)
        return gathered if keepdim else gathered.squeeze(dim)
    values, indices = torch.max(tensor, dim=dim, keepdim=True)
    values = _gather_along_dim(values, dim, group)  # one column a rank
    indices = _gather_along_dim(indices, dim, group)
    winner = torch.argmax(values, dim=dim, keepdim=True)
    result = torch.gather(indices, dim, winner) + winner * tensor.shape[dim]
    return result if keepdim else result.squeeze(dim)


def topk(
    tensor: torch.Tensor, k: int, dim: int, gather_dim: int, process_group: Group | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and global indices (int64) of the k largest elements along the sharded `dim`,
    sorted."""
    group = process_group or parallel_state.get_tensor_model_parallel_group()
    if dim % tensor.ndim != gather_dim % tensor.ndim:
        raise NotImplementedError(
            f"topk along dim {dim} of a tensor sharded along dim {gather_dim} is not modelled, "
            "expected the same dimension; gather the tensor first."
        )
    values, indices = TopK.apply(tensor, k, dim)
    indices = indices + group.rank() * tensor.shape[dim]
    values = _gather_along_dim(values, dim, group)
    indices = _gather_along_dim(indices, dim, group)
    best, where = torch.topk(values, k, dim=dim)
    return best, torch.gather(indices, dim, where)
