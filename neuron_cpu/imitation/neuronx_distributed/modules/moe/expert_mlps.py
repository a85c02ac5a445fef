"""The experts: one gated MLP each (NxD's modules.moe.expert_mlps)."""

from types import SimpleNamespace
from typing import Any, Optional

import torch
from torch import nn
from transformers.activations import ACT2FN

from ...keywords import refuse_others
from .moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear

# Ways to compute and shard, and what this one does not do.
_LATER = dict.fromkeys(
    (
        "block_size", "init_method", "output_layer_init_method", "device", "logical_nc_config",
        "tensor_model_parallel_group", "enable_spmd_rank", "blockwise_nki_autograd_cls",
        "use_torch_block_wise", "parallelize_token_to_block_mapping", "is_prefill",
        "optimized_block_to_token_mapping", "use_block_parallel", "block_sharding_strategy",
        "always_augment_inputs_for_blockwise_matmul", "skip_dma_token", "skip_dma_weight",
    ),
    ...,
) | {
    "return_bias": False, "bias": False, "hidden_act_scaling_factor": 1.0, "hidden_act_bias": 0.0,
    "early_expert_affinity_modulation": False, "expert_model_parallel_group": None,
    "sequence_parallel_enabled": False,
}  # fmt: skip


class Experts(nn.Module):
    """All experts: down(act(gate(x)) * up(x))."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.act_fn = ACT2FN[hidden_act]
        self.gate_up_proj = ExpertFusedColumnParallelLinear(
            num_experts, hidden_size, 2 * intermediate_size, dtype=dtype, stride=2
        )
        self.down_proj = ExpertFusedRowParallelLinear(
            num_experts, intermediate_size, hidden_size, dtype=dtype
        )

    def forward(self, x: torch.Tensor, chosen: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Partial results (E, T, H) of all experts for (T, H), or (n, T, H) of those ``chosen``
        (n,)."""
        gate, up = self.gate_up_proj(x[None], chosen).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up, chosen)


class ExpertMLPs(nn.Module):
    """The chosen experts' results, weighted by their affinities.

    NxD computes them in one of four ways, by the number of tokens: the chosen experts' weights
    only, all experts, blocks of tokens, or a capacity of tokens an expert. The first three agree up
    to rounding. Here the first way runs where a call chooses fewer experts than exist; otherwise
    all experts run. A capacity is refused.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        glu_mlp: bool,
        capacity_factor: Optional[float],
        *,
        normalize_top_k_affinities: bool = False,
        dtype: torch.dtype = torch.float32,
        **later: Any,
    ) -> None:
        super().__init__()
        refuse_others("ExpertMLPs", later, **_LATER)
        if not glu_mlp or capacity_factor is not None:
            raise NotImplementedError(
                f"Experts got glu_mlp={glu_mlp} and capacity_factor={capacity_factor}, expected "
                "True and None: others are not modelled."
            )
        if normalize_top_k_affinities and top_k == 1:
            raise ValueError(
                "normalize_top_k_affinities needs a top_k above 1, got 1: the one affinity would "
                "always be 1; switch it off."
            )
        self.num_experts, self.top_k = num_experts, top_k
        self.normalize_top_k_affinities = normalize_top_k_affinities
        self.routed_experts_mlp_config = SimpleNamespace(
            normalize_top_k_affinities=normalize_top_k_affinities
        )
        self.mlp_op = Experts(num_experts, hidden_size, intermediate_size, hidden_act, dtype)

    def forward(
        self,
        hidden_states: torch.Tensor,
        expert_affinities: torch.Tensor,
        expert_index: torch.Tensor,
        seq_len: int,
    ) -> torch.Tensor:
        """This rank's partial sums (T, H) for (T, H), affinities (T, E) and indices (T, k)."""
        del seq_len
        if expert_index.numel() < self.num_experts:
            return self._selected(hidden_states, expert_affinities, expert_index)
        chosen = torch.zeros_like(expert_affinities).scatter(1, expert_index, 1.0)
        weights = expert_affinities * chosen
        if self.normalize_top_k_affinities:
            weights = nn.functional.normalize(weights, p=1.0, dim=1)
        made = self.mlp_op(hidden_states)
        return (made * weights.t()[:, :, None]).sum(0)

    def _selected(
        self, hidden_states: torch.Tensor, affinities: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """`forward` for few tokens, from the weights of each token's own experts."""
        weights = affinities.gather(1, index)
        if self.normalize_top_k_affinities:
            weights = nn.functional.normalize(weights, p=1.0, dim=1)
        made = []
        for token in range(hidden_states.shape[0]):
            own = self.mlp_op(hidden_states[token : token + 1], index[token])[:, 0]
            made.append((own * weights[token][:, None]).sum(0))
        return torch.stack(made)
