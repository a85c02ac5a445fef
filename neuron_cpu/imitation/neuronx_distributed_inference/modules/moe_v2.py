"""A mixture of experts from an inference configuration alone (NxDI 0.6)."""

from typing import Any

from neuronx_distributed.experts import ExpertMLPs, MoE, RouterTopK
from torch import nn


def initialize_moe_module(
    config: Any,
    rmsnorm: nn.Module | None = None,
    init_tkg_module: bool = False,
    apply_act_fn_over_topk: bool = False,
    router_bias: bool = False,
    experts_bias: bool = False,
) -> MoE:
    """Router and experts, sharded over the running rank's group.

    The router has the type that `router_config` names, the experts the model's. A `rmsnorm` is
    applied in front of both; `init_tkg_module` asks for a closed kernel with equal results.

    Raises:
        NotImplementedError: for shared experts, expert parallelism and what a keyword refuses.
        ValueError: the experts' inner features do not divide among the ranks.
    """
    neuron_config = config.neuron_config
    if getattr(config, "n_shared_experts", 0) or neuron_config.moe_ep_degree > 1:
        raise NotImplementedError(
            f"n_shared_experts is {getattr(config, 'n_shared_experts', 0)} and moe_ep_degree "
            f"{neuron_config.moe_ep_degree}, expected 0 and 1: shared experts and expert "
            "parallelism are not modelled."
        )
    inner, ranks = config.intermediate_size, neuron_config.tp_degree
    if inner % ranks:
        raise ValueError(
            f"moe_intermediate_size {inner} does not divide among {ranks} ranks, expected a "
            "multiple; choose another tp_degree."
        )
    router = RouterTopK(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.hidden_size,
        dtype=neuron_config.router_config.dtype,
        act_fn=neuron_config.router_config.act_fn,
        bias=router_bias,
        apply_act_fn_over_topk=apply_act_fn_over_topk,
        store_transposed_weights=init_tkg_module,
    )
    experts = ExpertMLPs(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        intermediate_size=inner,
        hidden_act=config.hidden_act,
        glu_mlp=neuron_config.glu_mlp,
        capacity_factor=neuron_config.capacity_factor,
        normalize_top_k_affinities=neuron_config.normalize_top_k_affinities,
        block_size=neuron_config.blockwise_matmul_config.block_size,
        dtype=neuron_config.torch_dtype,
        bias=experts_bias,
        early_expert_affinity_modulation=neuron_config.early_expert_affinity_modulation,
    )
    return MoE(router, experts, rmsnorm=rmsnorm)
