"""Router and experts as one module (NxD's modules.moe.model)."""

from typing import Optional, Tuple

import torch
from torch import nn

from ...parallel_layers.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from .expert_mlps import ExpertMLPs
from .routing import RouterTopK


class MoE(nn.Module):
    """The module (B, S, H) -> a tuple of the same; under sequence parallelism S is this rank's
    part."""

    def __init__(
        self,
        router: RouterTopK,
        expert_mlps: ExpertMLPs,
        *,
        rmsnorm: Optional[nn.Module] = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: Optional[int] = None,
    ) -> None:
        super().__init__()
        self.router, self.expert_mlps, self.rmsnorm = router, expert_mlps, rmsnorm
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = 1 if sequence_dimension is None else sequence_dimension

    def forward(
        self,
        hidden_states: torch.Tensor,
        padding_mask: Optional[torch.Tensor] = None,
        is_speculative_decoding: bool = False,
    ) -> Tuple[torch.Tensor]:
        """Add up all experts, then all-reduce or reduce-scatter the sum once. A ``padding_mask``
        changes no result: it only keeps padding from taking an expert's time."""
        del padding_mask, is_speculative_decoding
        if self.rmsnorm is not None:
            hidden_states = self.rmsnorm(hidden_states)
        if self.sequence_parallel_enabled:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, self.sequence_dimension
            )
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, affinities, indices = self.router(tokens)
        partial = self.expert_mlps(tokens, affinities, indices, hidden_states.shape[1]).reshape(
            hidden_states.shape
        )
        if self.sequence_parallel_enabled:
            return (reduce_scatter_to_sequence_parallel_region(partial, self.sequence_dimension),)
        return (reduce_from_tensor_model_parallel_region(partial),)
