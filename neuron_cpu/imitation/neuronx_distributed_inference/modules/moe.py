"""A mixture of experts from an inference configuration."""

from typing import Any

from neuronx_distributed.modules.moe.expert_mlps import ExpertMLPs
from neuronx_distributed.modules.moe.model import MoE
from neuronx_distributed.modules.moe.routing import RouterTopK


def initialize_moe_module(
    config: Any,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    hidden_act: str,
    normalize_top_k_affinities: bool = True,
) -> MoE:
    """Router and experts in the model's type, sharded over the running rank's group."""
    neuron_config = config.neuron_config
    dtype = neuron_config.torch_dtype
    experts = ExpertMLPs(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        hidden_act=hidden_act,
        glu_mlp=neuron_config.glu_mlp,
        capacity_factor=neuron_config.capacity_factor,
        normalize_top_k_affinities=normalize_top_k_affinities,
        dtype=dtype,
    )
    router = RouterTopK(num_experts, top_k, hidden_size, dtype=dtype)
    parallel = neuron_config.sequence_parallel_enabled
    return MoE(router, experts, sequence_parallel_enabled=parallel)
