"""Parallel linear layers with int8 or fp8 weights (NxD, quantization/quantization_layers.py).

`y = x W^T` takes the weight in the input's type, unscaled: bf16 holds integers up to 127 exactly.
The product becomes fp32, is scaled, and returns to the input's type. A row-parallel layer scales
before it sums the ranks. Scales are fp32: (1,) for a tensor, (out, 1) for channels. A
column-parallel layer cuts them with its rows; every rank of a row-parallel layer has them whole.
"""

from __future__ import annotations

import weakref
from typing import Any, Dict, Optional, Tuple

import torch
from torch import nn

from ..deferred import parameter_device
from ..parallel_layers.layers import (
    BaseParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    pad_tensor,
)
from ..parallel_layers.utils import set_tensor_model_parallel_attributes
from .quantization_config import (
    ActivationQuantizationType,
    QConfig,
    QuantizationType,
    QuantizedDtype,
)

# Of fused projections, whose rows are cut in three parts.
_FUSED_TAGS = ("fused_qkv", "num_attention_heads", "num_key_value_heads", "head_dim")
# Attributes of a float layer that its quantised one takes under the same names.
_SHARED = (
    *("dtype", "stride", "sequence_parallel_enabled", "sequence_dimension", "skip_bias_add"),
    *("pad", "reduce_dtype", "input_size", "output_size"),
)
_SETTINGS = (  # of a conversion
    *("quantization_type", "quantized_dtype", "quantization_per_channel_axis"),
    "activation_quantization_type",
)


_CASTS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


class BaseQuantizeParallelLinear(BaseParallelLinear):
    """Weight, scale and product of the two quantised layers. A quantised layer takes the arguments
    of its float layer, the next of its bases, and the kind of quantisation."""

    quantized_dtype: QuantizedDtype
    quantization_type: QuantizationType
    float_class: type
    own_arguments: Tuple[str, ...]
    padded_size: str
    shards_scale = False  # along the output features

    def __init__(
        self,
        *arguments: Any,
        quantization_type: Any = QuantizationType.PER_TENSOR_SYMMETRIC,
        quantized_dtype: QuantizedDtype = QuantizedDtype.INT8,
        quantization_per_channel_axis: Optional[int] = None,
        activation_quantization_type: Any = None,
        clamp_bound: float = float("inf"),
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        del clamp_bound  # of activations
        self.quantization_type = QuantizationType(quantization_type)
        self.quantized_dtype = quantized_dtype
        self._quantise(quantization_per_channel_axis, activation_quantization_type)

    def _quantise(self, per_channel_axis: Optional[int], activation: Any) -> None:
        """Give the weight its type, and the layer its scale."""
        if ActivationQuantizationType(getattr(activation, "value", activation)).value is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: quantised activations are not supported by neuron_cpu, "
                "expected activation_quantization_type None; leave it out."
            )
        per_channel = self.quantization_type is QuantizationType.PER_CHANNEL_SYMMETRIC
        if per_channel and per_channel_axis not in (None, 0):
            raise AssertionError(
                f"{type(self).__name__}: quantization_per_channel_axis is {per_channel_axis}, "
                "expected 0, the output features."
            )
        old = self.weight
        stored = torch.zeros(old.shape, dtype=self.quantized_dtype.value, device=old.device)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.weight.__dict__.update(old.__dict__)
        rows = (old.shape[0], 1) if per_channel else (1,)
        device = parameter_device() or old.device
        ones = torch.ones(rows, dtype=torch.float32, device=device)
        self.scale = nn.Parameter(ones, requires_grad=False)
        if per_channel and self.shards_scale:
            size = self.tensor_parallel_group.size()
            set_tensor_model_parallel_attributes(self.scale, True, 0, self.stride, size)
        self._multiply, self._forward_impl = self._forward_impl, self._scaled_product

    def _scaled_product(
        self, input: torch.Tensor, weight: torch.Tensor, **arguments: Any
    ) -> torch.Tensor:
        """The plain layer's product, times the scale in fp32."""
        product = self._multiply(input=input, weight=self._cast(weight, input.dtype), **arguments)
        return (product.to(torch.float32) * self.scale.view(-1)).to(input.dtype)

    def _cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight in the input's type, kept for all sub-models. PyTorch takes a second to cast
        the 135 million fp8 weights of one decode step."""
        if weight.is_meta:
            return weight.to(dtype)
        key = weight.data_ptr(), tuple(weight.shape), weight._version, dtype
        cast = _CASTS.get(key)
        if cast is None:
            cast = _CASTS[key] = weight.to(dtype)
        self._kept = weight, cast  # as long as the weight lives, nothing else has its address
        return cast

    @classmethod
    def from_float(cls, mod: Any, q_config: QConfig) -> Any:
        """The layer of the same sizes, without the weights' values, with the bias, which is cast
        already, and with the mode."""
        if type(mod) is not cls.float_class:
            raise AssertionError(
                f"Expected a {cls.float_class.__name__}, got {type(mod).__name__}."
            )
        found = {name: getattr(mod, name) for name in (*_SHARED, *cls.own_arguments)}
        found[cls.padded_size] -= mod.pad_size
        found |= {name: q_config[name] for name in _SETTINGS if name in q_config}
        group = mod.tensor_parallel_group
        made = cls(bias=mod.add_bias, tensor_model_parallel_group=group, **found)
        if getattr(mod.weight, "fused_qkv", False):
            tags = {name: getattr(mod.weight, name) for name in _FUSED_TAGS}
            for parameter in (made.weight, made.scale):
                if parameter.dim() == 2:  # one scale of a whole tensor is not cut
                    parameter.__dict__.update(tags)
        if mod.bias is not None:
            made.bias = mod.bias
        return made.train(mod.training)


class QuantizedColumnParallel(BaseQuantizeParallelLinear, ColumnParallelLinear):
    """ColumnParallelLinear with quantised weights; it takes that layer's arguments, too."""

    float_class = ColumnParallelLinear
    own_arguments = ("gather_output",)
    padded_size = "output_size"
    shards_scale = True

    def preshard_hook(self, model_state_dict: Dict[str, torch.Tensor], prefix: str) -> None:
        """Pad the full weight, a sharded bias and channels' scales before they are sliced."""
        super().preshard_hook(model_state_dict, prefix)
        key = prefix.rpartition("weight")[0] + "scale"
        scale = model_state_dict.get(key)
        if self.pad_size and scale is not None and scale.numel() > 1:
            model_state_dict[key] = pad_tensor(scale, 0, self.output_size - scale.shape[0])


class QuantizedRowParallel(BaseQuantizeParallelLinear, RowParallelLinear):
    """RowParallelLinear with quantised weights; it takes that layer's arguments, too."""

    float_class = RowParallelLinear
    own_arguments = ("input_is_parallel", "reduce_output")
    padded_size = "input_size"
