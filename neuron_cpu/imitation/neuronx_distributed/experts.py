"""Mixtures of experts, of which each token takes a few: router and MLPs (NxD's modules.moe)."""

from types import SimpleNamespace
from typing import Any

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
        device: torch.device | None = None,
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
        self, input_: torch.Tensor, expert_indices: torch.Tensor | None = None
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
            "RouterTopK",
            later,
            sequence_parallel_enabled=...,
            sequence_dimension=...,
            device=...,
            tensor_model_parallel_group=...,
            jitter_eps=0.0,
            bias=False,
            apply_act_fn_over_topk=False,
            store_transposed_weights=...,
        )
        if act_fn != "softmax":
            raise NotImplementedError(
                f"RouterTopK got act_fn={act_fn!r}, expected 'softmax': other affinities are not "
                "modelled."
            )
        self.num_experts, self.top_k, self.act_fn = num_experts, top_k, act_fn
        self.linear_router = nn.Linear(hidden_size, num_experts, bias=False, dtype=dtype)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
        "init_method", "output_layer_init_method", "device", "logical_nc_config",
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

    def forward(self, x: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Partial results (E, T, H) of all experts, or (n, T, H) of those ``chosen`` (n,).

        ``x`` is (1, T, H), the same tokens for each expert, or has tokens of each one's own.
        """
        gate, up = self.gate_up_proj(x, chosen).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up, chosen)


class ExpertMLPs(nn.Module):
    """The chosen experts' results, weighted by their affinities.

    NxD computes them in one of four ways, by the number of tokens: the chosen experts' weights
    only, all experts, blocks of tokens, or a capacity of tokens an expert. The first three agree up
    to rounding, and run here. A capacity is refused. A prompt runs in blocks from NxD's length on,
    ``block_size`` choices, if blocks also have fewer rows than all experts: with 512, Mixtral (the
    best 2 of 8) from 641 tokens on and Qwen3 (8 of 128) from 545.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        glu_mlp: bool,
        capacity_factor: float | None,
        *,
        normalize_top_k_affinities: bool = False,
        block_size: int | None = None,
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
        self.num_experts, self.top_k, self.block_size = num_experts, top_k, block_size or 512
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
        weights = expert_affinities.gather(1, expert_index)
        if self.normalize_top_k_affinities:
            weights = nn.functional.normalize(weights, p=1.0, dim=1)
        if expert_index.numel() < self.num_experts:
            return self._selected(hidden_states, weights, expert_index)
        blocks = self.blocks(expert_index.numel())
        all_rows = self.num_experts * expert_index.shape[0]
        long = seq_len > 1 and expert_index.numel() >= self.block_size
        if long and blocks * self.block_size < all_rows:
            return self._in_blocks(hidden_states, weights, expert_index, blocks)
        spread = torch.zeros_like(expert_affinities).scatter(1, expert_index, weights)
        return (self.mlp_op(hidden_states[None]) * spread.t()[:, :, None]).sum(0)

    def blocks(self, choices: int) -> int:
        """The most blocks that ``choices`` >= E can fill: all experts but one have one token."""
        return (choices - self.num_experts) // self.block_size + self.num_experts

    def _selected(
        self, hidden_states: torch.Tensor, weights: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """`forward` for few tokens, from the weights of each token's own experts."""
        made = []
        for token in range(hidden_states.shape[0]):
            own = self.mlp_op(hidden_states[None, token : token + 1], index[token])[:, 0]
            made.append((own * weights[token][:, None]).sum(0))
        return torch.stack(made)

    def _in_blocks(
        self, hidden_states: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, blocks: int
    ) -> torch.Tensor:
        """`forward` of blocks of tokens, one expert a block (Gale et al. 2022, "MegaBlocks").

        An expert with n tokens has the next ceil(n / block_size) blocks. Slots beyond its tokens
        compute token 0, which nobody reads. Counts give the places, as the compiler has no sort.
        """
        (tokens, hidden), size, device = hidden_states.shape, self.block_size, index.device
        chosen = torch.zeros((tokens, self.num_experts), dtype=torch.int64, device=device)
        chosen = chosen.scatter(1, index, 1)
        needed = (chosen.sum(0) + size - 1) // size
        ends = needed.cumsum(0)
        places = ((ends - needed) * size + chosen.cumsum(0) - 1).gather(1, index)
        rows = torch.arange(tokens, device=device)[:, None].expand(places.shape)
        slots = torch.zeros(blocks * size, dtype=torch.int64, device=device)
        slots = slots.scatter(0, places.reshape(-1), rows.reshape(-1))
        owners = (ends[None] <= torch.arange(blocks, device=device)[:, None]).sum(1)
        gathered = hidden_states[slots].reshape(blocks, size, hidden)
        made = self.mlp_op(gathered, owners.clamp(max=self.num_experts - 1))
        return (made.reshape(-1, hidden)[places] * weights[:, :, None]).sum(1)


class MoE(nn.Module):
    """The module (B, S, H) -> a tuple of the same."""

    def __init__(
        self, router: RouterTopK, expert_mlps: ExpertMLPs, *, rmsnorm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.router, self.expert_mlps, self.rmsnorm = router, expert_mlps, rmsnorm

    def forward(
        self,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        is_speculative_decoding: bool = False,
    ) -> tuple[torch.Tensor]:
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
