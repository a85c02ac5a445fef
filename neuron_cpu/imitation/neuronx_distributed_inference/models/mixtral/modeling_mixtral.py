"""The baseline Mixtral: Llama's attention, and experts instead of its MLP.

Written from the interface of NxDI 0.1.0's module of the same name; later versions by contract.py.
"""

from typing import Any, Dict, List, Tuple, Type

import torch
from torch import nn
from transformers import MixtralForCausalLM

from ...modules.moe import initialize_moe_module
from ..application_base import refuse_options
from ..config import InferenceConfig, MoENeuronConfig, NeuronConfig
from ..llama.modeling_llama import (
    LlamaInferenceConfig,
    NeuronLlamaDecoderLayer,
    NeuronLlamaForCausalLM,
    NeuronLlamaModel,
)

StateDict = Dict[str, torch.Tensor]


class MixtralInferenceConfig(LlamaInferenceConfig):
    """Configuration of a Mixtral; Hugging Face's attributes under their own names."""

    def get_required_attributes(self) -> List[str]:
        return [*super().get_required_attributes(), "num_local_experts", "num_experts_per_tok"]

    @classmethod
    def get_neuron_config_cls(cls) -> Type[NeuronConfig]:
        return MoENeuronConfig


class NeuronMixtralDecoderLayer(NeuronLlamaDecoderLayer):
    """A Llama's layer with experts in the place of its MLP."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__(config)
        self.mlp = initialize_moe_module(
            config=config,
            num_experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
        )


class NeuronMixtralModel(NeuronLlamaModel):
    """The traced Mixtral."""

    decoder_layer_cls = NeuronMixtralDecoderLayer


def stack_experts(
    state_dict: StateDict,
    config: InferenceConfig,
    block: str,
    experts: int,
    names: Tuple[str, str, str],
) -> None:
    """Stack the experts of each layer's ``block``, whose weights of gate, up and down have these
    ``names``: gate and up (E, H, 2I), down (E, I, H)."""
    for layer in range(config.num_hidden_layers):
        old, new = f"layers.{layer}.{block}.", f"layers.{layer}.mlp."
        if f"{old}gate.weight" not in state_dict:  # converted already
            continue
        router = state_dict.pop(f"{old}gate.weight")
        state_dict[f"{new}router.linear_router.weight"] = router
        gate, up, down = (
            torch.stack(
                [state_dict.pop(f"{old}experts.{e}.{name}.weight").t() for e in range(experts)]
            )
            for name in names
        )
        stacked = f"{new}expert_mlps.mlp_op."
        state_dict[f"{stacked}gate_up_proj.weight"] = torch.cat((gate, up), dim=2)
        state_dict[f"{stacked}down_proj.weight"] = down


def convert_mixtral_to_neuron_state_dict(
    state_dict: StateDict, config: InferenceConfig
) -> StateDict:
    """The experts of a Mixtral's checkpoint, stacked."""
    names, experts = ("w1", "w3", "w2"), config.num_local_experts
    stack_experts(state_dict, config, "block_sparse_moe", experts, names)
    return state_dict


class NeuronMixtralForCausalLM(NeuronLlamaForCausalLM):
    """The application: checkpoint conversion around the traced Mixtral."""

    _model_cls = NeuronMixtralModel

    @classmethod
    def validate_config(cls, config: InferenceConfig) -> None:
        super().validate_config(config)
        refuse_options(config.neuron_config, ("lora_config", "quantized"))
        window = getattr(config, "sliding_window", None)
        if window is not None and window < config.neuron_config.seq_len:
            raise NotImplementedError(
                f"sliding_window {window} is shorter than seq_len {config.neuron_config.seq_len}, "
                "expected none: every token sees all before it here; choose a shorter seq_len."
            )

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> nn.Module:
        return MixtralForCausalLM.from_pretrained(model_path, **kwargs)

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: StateDict, config: InferenceConfig
    ) -> StateDict:
        """A Llama's conversion, and the experts."""
        state_dict = convert_mixtral_to_neuron_state_dict(state_dict, config)
        return NeuronLlamaForCausalLM.convert_hf_to_neuron_state_dict(state_dict, config)

    @classmethod
    def get_config_cls(cls) -> Type[InferenceConfig]:
        return MixtralInferenceConfig
