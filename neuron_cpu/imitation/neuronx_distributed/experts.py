"""Mixtures of experts, of which each token takes a few: router and MLPs (NxD's modules.moe)."""

from types import SimpleNamespace
from typing import Any, Optional, Tuple

import torch
from torch import nn
from transformers.activations import ACT2FN

from .keywords import refuse_others
from .parallel_layers.layers import BaseParallelLinear, _sharded_parameter
from .parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from .parallel_layers.utils import divide


class _ExpertLinear(BaseParallelLinear):
    """`forward(x (E or 1, T, K))` -> (E, T, N): the product of each expert with its own weight."""

    sharded_dim: int

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: Optional[torch.device] = None,
        stride: int = 1,
    ) -> None:
        super().__init__()
        size = self._group_of(None).size()
        shape = [num_experts, input_size, output_size]
        shape[self.sharded_dim] = divide(shape[self.sharded_dim], size)
        self.weight = _sharded_parameter(
            tuple(shape), self.sharded_dim, stride, size, dtype, device, self._init_weight
        )

    def forward(
        self, input_: torch.Tensor, expert_indices: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """All experts' products (E, T, N), or (n, T, N) of ``expert_indices`` (n,)."""
        return torch.matmul(
            input_, self.weight if expert_indices is None else self.weight[expert_indices]
        )


class ExpertFusedColumnParallelLinear(_ExpertLinear):
    """The outputs are sharded: weight (E, input, output/tp). `stride` s means s fused matrices."""

    sharded_dim = 2


class ExpertFusedRowParallelLinear(_ExpertLinear):
    """The inputs are sharded: weight (E, input/tp, output). Results are partial sums of a rank."""

    sharded_dim = 1


class RouterTopK(nn.Module):
    """Scores all experts and names the best `top_k` of each token; ranks agree."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        act_fn: str = "softmax",
        **later: Any,
    ) -> None:
        super().__init__()
        refuse_others(
            "RouterTopK", later, sequence_parallel_enabled=..., sequence_dimension=..., device=...,
            tensor_model_parallel_group=..., jitter_eps=0.0, bias=False,
            apply_act_fn_over_topk=False, store_transposed_weights=...,
        )  # fmt: skip
        if act_fn != "softmax":
            raise NotImplementedError(
                f"RouterTopK got act_fn={act_fn!r}, expected 'softmax': other affinities are not "
                "modelled."
            )
        self.num_experts, self.top_k, self.act_fn = num_experts, top_k, act_fn
        self.linear_router = nn.Linear(hidden_size, num_experts, bias=False, dtype=dtype)

    def forward(self, hidden_states: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Logits (T, E), affinities (T, E) and indices (T, k) of tokens (T, H).

        The product has the router's own type. The softmax runs in fp64 and returns in the
        activations' type. The logits decide the choice.
        """
        logits = self.linear_router(hidden_states.to(self.linear_router.weight.dtype))
        affinities = torch.softmax(logits.to(torch.float64), dim=-1).to(hidden_states.dtype)
        _, indices = torch.topk(logits, self.top_k, dim=-1)
        return logits, affinities, indices


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


class MoE(nn.Module):
    """The module (B, S, H) -> a tuple of the same."""

    def __init__(
        self, router: RouterTopK, expert_mlps: ExpertMLPs, *, rmsnorm: Optional[nn.Module] = None
    ) -> None:
        super().__init__()
        self.router, self.expert_mlps, self.rmsnorm = router, expert_mlps, rmsnorm

    def forward(
        self,
        hidden_states: torch.Tensor,
        padding_mask: Optional[torch.Tensor] = None,
        is_speculative_decoding: bool = False,
    ) -> Tuple[torch.Tensor]:
        """Add up all experts, then all-reduce the sum once. A ``padding_mask``
        changes no result: it only keeps padding from taking an expert's time."""
        del padding_mask, is_speculative_decoding
        if self.rmsnorm is not None:
            hidden_states = self.rmsnorm(hidden_states)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, affinities, indices = self.router(tokens)
        partial = self.expert_mlps(tokens, affinities, indices, hidden_states.shape[1]).reshape(
            hidden_states.shape
        )
        return (reduce_from_tensor_model_parallel_region(partial),)
