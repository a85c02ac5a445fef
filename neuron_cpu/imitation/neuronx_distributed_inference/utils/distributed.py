"""Which group the layers of a model belong to, and a rank's part of a tensor."""

from typing import Any, Optional

import torch
from neuronx_distributed.parallel_layers import parallel_state

from neuron_cpu.errors import CompileError
from neuron_cpu.runtime.ranks import Group


def get_tp_group(config: Any) -> Optional[Group]:
    """None (the default group) unless the model is a draft with ranks of its own."""
    if getattr(config.neuron_config, "use_draft_group", False):
        return parallel_state.get_speculative_draft_group(as_list=False)
    return None


def get_cp_rank(global_rank: torch.Tensor, tp_degree: int) -> torch.Tensor:
    """Which part of a prompt is a rank's, where `tp_degree` ranks split the heads of each: (1,)."""
    return global_rank // tp_degree


def split_along_dim(
    tensor: torch.Tensor, dim: int, rank: torch.Tensor, num_partitions: int
) -> torch.Tensor:
    """The `rank`-th, a tensor (1,), of equal parts of a dimension; one graph serves all ranks."""
    length = tensor.shape[dim]
    if length % num_partitions:
        raise CompileError(
            f"A context-encoding bucket has {length} tokens, expected a multiple of cp_degree "
            f"{num_partitions}; change max_context_length or context_encoding_buckets."
        )
    size = length // num_partitions
    places = torch.arange(size, device=tensor.device) + rank.long() * size
    return torch.index_select(tensor, dim, places)
