"""The baseline Qwen3-MoE: Qwen3's attention, and experts in the place of the MLP.

The names are those of NxDI's module for this type of model, which came with 0.5.
"""

from typing import Any

import torch

from ...modules.moe_v2 import initialize_moe_module
from ..config import InferenceConfig, MoENeuronConfig, NeuronConfig
from ..llama.modeling_llama import NeuronLlamaDecoderLayer, NeuronLlamaModel
from ..qwen3.modeling_qwen3 import NeuronQwen3ForCausalLM, Qwen3InferenceConfig

StateDict = dict[str, torch.Tensor]


class Qwen3MoeInferenceConfig(Qwen3InferenceConfig):
    """A Qwen3-MoE's configuration; attributes have Hugging Face's names."""

    def add_derived_config(self) -> None:
        """Set the names that `initialize_moe_module` reads; the router is fp32 for accuracy."""
        super().add_derived_config()
        refuse_dense(self)
        self.num_local_experts, self.n_shared_experts = self.num_experts, 0
        self.intermediate_size = self.moe_intermediate_size
        self.neuron_config.router_config.dtype = torch.float32
        self.neuron_config.normalize_top_k_affinities = self.norm_topk_prob

    def get_required_attributes(self) -> list[str]:
        own = ["head_dim", "moe_intermediate_size", "num_experts", "num_experts_per_tok"]
        return [*super().get_required_attributes(), *own, "norm_topk_prob"]

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return MoENeuronConfig


def refuse_dense(config: InferenceConfig) -> None:
    """ValueError where a layer is no mixture of experts."""
    experts = getattr(config, "num_experts", 0) or 0
    dense = list(getattr(config, "mlp_only_layers", None) or [])
    step = getattr(config, "decoder_sparse_step", 1)
    if not experts or dense or step != 1:
        raise ValueError(
            f"The checkpoint has num_experts {experts}, mlp_only_layers {dense} and "
            f"decoder_sparse_step {step}, expected experts in every layer; use a Qwen3-MoE such as "
            "Qwen3-30B-A3B."
        )


class NeuronQwen3MoeDecoderLayer(NeuronLlamaDecoderLayer):
    """A Llama's layer with norms of heads, and experts instead of its MLP."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__(config)
        self.mlp = initialize_moe_module(config)

    def mlp_output(self, normed: torch.Tensor, given: Any) -> torch.Tensor:
        return self.mlp(normed, given.get("padding_mask"))[0]


class NeuronQwen3MoeModel(NeuronLlamaModel):
    """The traced Qwen3-MoE."""

    decoder_layer_cls = NeuronQwen3MoeDecoderLayer


def stack_experts(state_dict: StateDict, config: InferenceConfig) -> None:
    """Stack each layer's experts: gate and up (E, H, 2I), down (E, I, H)."""
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}.mlp."
        if f"{prefix}gate.weight" not in state_dict:  # converted already
            continue
        state_dict[f"{prefix}router.linear_router.weight"] = state_dict.pop(f"{prefix}gate.weight")
        gate, up, down = (
            torch.stack(
                [
                    state_dict.pop(f"{prefix}experts.{expert}.{name}_proj.weight").t()
                    for expert in range(config.num_experts)
                ]
            )
            for name in ("gate", "up", "down")
        )
        stacked = f"{prefix}expert_mlps.mlp_op."
        state_dict[f"{stacked}gate_up_proj.weight"] = torch.cat((gate, up), dim=2)
        state_dict[f"{stacked}down_proj.weight"] = down


class NeuronQwen3MoeForCausalLM(NeuronQwen3ForCausalLM):
    """The application: checkpoint conversion around the traced Qwen3-MoE."""

    _model_cls = NeuronQwen3MoeModel

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: StateDict, config: InferenceConfig
    ) -> StateDict:
        """Convert like a Qwen3, and stack the experts."""
        stack_experts(state_dict, config)
        return NeuronQwen3ForCausalLM.convert_hf_to_neuron_state_dict(state_dict, config)

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        return Qwen3MoeInferenceConfig
