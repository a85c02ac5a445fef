"""The baseline Qwen3-MoE: Qwen3's attention, and experts in the place of the MLP.

The names are those of NxDI's module for this type of model, which came with 0.5.
"""

from typing import Any, Dict, List, Type

import torch
from torch import nn
from transformers import Qwen3MoeForCausalLM

from ...modules.moe_v2 import initialize_moe_module
from ..application_base import refuse_options
from ..config import InferenceConfig, MoENeuronConfig, NeuronConfig
from ..llama.modeling_llama import NeuronLlamaDecoderLayer, NeuronLlamaModel
from ..mixtral.modeling_mixtral import stack_experts
from ..qwen3.modeling_qwen3 import NeuronQwen3ForCausalLM, Qwen3InferenceConfig

StateDict = Dict[str, torch.Tensor]


class Qwen3MoeInferenceConfig(Qwen3InferenceConfig):
    """Configuration of a Qwen3-MoE; Hugging Face's attributes under their own names."""

    def add_derived_config(self) -> None:
        """The names that `initialize_moe_module` reads; the router is fp32 for accuracy."""
        super().add_derived_config()
        refuse_dense(self)
        self.num_local_experts, self.n_shared_experts = self.num_experts, 0
        self.intermediate_size = self.moe_intermediate_size
        self.neuron_config.router_config.dtype = torch.float32
        self.neuron_config.normalize_top_k_affinities = self.norm_topk_prob

    def get_required_attributes(self) -> List[str]:
        own = ["head_dim", "moe_intermediate_size", "num_experts", "num_experts_per_tok"]
        return [*super().get_required_attributes(), *own, "norm_topk_prob"]

    @classmethod
    def get_neuron_config_cls(cls) -> Type[NeuronConfig]:
        return MoENeuronConfig


def refuse_dense(config: InferenceConfig) -> None:
    """ValueError where not every layer is a mixture of experts."""
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
    """A Llama's layer with norms of heads, and experts in the place of its MLP."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__(config)
        self.mlp = initialize_moe_module(config)


class NeuronQwen3MoeModel(NeuronLlamaModel):
    """The traced Qwen3-MoE."""

    decoder_layer_cls = NeuronQwen3MoeDecoderLayer


class NeuronQwen3MoeForCausalLM(NeuronQwen3ForCausalLM):
    """The application: checkpoint conversion around the traced Qwen3-MoE."""

    _model_cls = NeuronQwen3MoeModel

    @classmethod
    def validate_config(cls, config: InferenceConfig) -> None:
        super().validate_config(config)
        refuse_options(config.neuron_config, ("lora_config", "quantized"))

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> nn.Module:
        return Qwen3MoeForCausalLM.from_pretrained(model_path, **kwargs)

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: StateDict, config: InferenceConfig
    ) -> StateDict:
        """A Qwen3's conversion, and the experts."""
        names = "gate_proj", "up_proj", "down_proj"
        stack_experts(state_dict, config, "mlp", config.num_experts, names)
        return NeuronQwen3ForCausalLM.convert_hf_to_neuron_state_dict(state_dict, config)

    @classmethod
    def get_config_cls(cls) -> Type[InferenceConfig]:
        return Qwen3MoeInferenceConfig
