"""The k largest elements of a tensor that is sharded along `gather_dim`."""

from typing import Optional, Tuple

import torch
from torch_neuronx.xla_impl.ops import TopK

from neuron_cpu.runtime.ranks import Group

from ..parallel_layers import parallel_state
from ..parallel_layers.mappings import _gather_along_dim


def topk(
    tensor: torch.Tensor, k: int, dim: int, gather_dim: int, process_group: Optional[Group] = None
) -> Tuple[torch.Tensor, torch.Tensor]:
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
