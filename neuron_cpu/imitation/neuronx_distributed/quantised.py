"""Weight quantisation: types, checkpoints, quantised parallel layers, conversion of a built model.

NxDI reaches int8 and fp8 (e4m3) weights through it, with one scale a tensor or a channel. Source:
aws-neuron/neuronx-distributed, src/neuronx_distributed/quantization, whose modules are named in the
package's table. amax is the largest absolute weight, of the tensor or of a row; all arithmetic is
in fp32:

    int8 per tensor     scale amax / 127.5           round half to even, clamp to -128 .. 127
    int8 per channel    scale amax / 127, at least the fp32 epsilon; the same rounding
    fp8 per tensor      scale amax / 240             clamp to +-240, cast
    fp8 per channel     scale amax / 240, from NxD 0.11 on at least 1e-5; the same

(int8 per tensor is PyTorch's default dynamic quantisation.) A layer `y = x W^T` takes the weight in
the input's type, unscaled: bf16 holds integers up to 127 exactly. The product becomes fp32, is
scaled, and returns to the input's type. A row-parallel layer scales before it sums the ranks.
Scales are fp32: (1,) for a tensor, (out, 1) for channels. A column-parallel layer cuts them with
its rows; every rank of a row-parallel layer has them whole.
"""

from __future__ import annotations

import copy
import weakref
from enum import Enum
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch
from torch import nn

from neuron_cpu.console import progress

from .deferred import parameter_device
from .parallel_layers.layers import (
    BaseParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    pad_tensor,
)
from .parallel_layers.utils import set_tensor_model_parallel_attributes


class QuantizationType(Enum):
    """The extent of one scale."""

    PER_TENSOR_SYMMETRIC = "per_tensor_symmetric"
    PER_CHANNEL_SYMMETRIC = "per_channel_symmetric"


class ActivationQuantizationType(Enum):
    """The way in which activations are quantised (NxD 0.11 and later)."""

    NONE = None
    DYNAMIC = "dynamic"


class QuantizedDtype(Enum):
    """Storage type of quantised weights."""

    INT8 = torch.int8
    F8E4M3 = torch.float8_e4m3fn
    F8E5M2 = torch.float8_e5m2


class DtypeBound:
    """The largest and the least value of quantised weights."""

    # e4m3 on Neuron ends at 240: what OCP's type has beyond it reads as infinity or NaN there
    # (NxD, quantization/README_rescaling_fp8_for_neuron.md).
    BOUNDS = {
        torch.int8: (127, -128),
        torch.float8_e4m3fn: (240.0, -240.0),
        torch.float8_e5m2: (57344.0, -57344.0),
    }

    @classmethod
    def from_torch_dtype(cls, dtype: torch.dtype) -> tuple:
        """(largest, smallest)."""
        return cls.BOUNDS[dtype]


QConfig = Dict[str, Any]


def get_default_custom_qconfig_dict() -> QConfig:
    """The settings of one int8 scale a tensor."""
    return {
        "quantization_type": QuantizationType.PER_TENSOR_SYMMETRIC,
        "quantized_dtype": QuantizedDtype.INT8,
    }


def get_default_per_channel_custom_qconfig_dict() -> QConfig:
    """The settings of one int8 scale an output feature."""
    return {
        "quantization_type": QuantizationType.PER_CHANNEL_SYMMETRIC,
        "quantized_dtype": QuantizedDtype.INT8,
        "quantization_per_channel_axis": 0,
    }


def qconfig_of(quantization_type: Union[str, QuantizationType], dtype: QuantizedDtype) -> QConfig:
    """A conversion's settings for a type and a dtype."""
    per_channel = QuantizationType(quantization_type) is QuantizationType.PER_CHANNEL_SYMMETRIC
    whole, channels = get_default_custom_qconfig_dict, get_default_per_channel_custom_qconfig_dict
    return (channels if per_channel else whole)() | {"quantized_dtype": dtype}


NEURON_CONFIG_DTYPES = {"int8": QuantizedDtype.INT8, "f8e4m3": QuantizedDtype.F8E4M3}


def dtype_of(name: Optional[str]) -> QuantizedDtype:
    """The member that NeuronConfig.quantization_dtype names. ValueError for other names, which NxDI
    would take for int8."""
    if name not in NEURON_CONFIG_DTYPES:
        raise ValueError(
            f"quantization_dtype must be one of {', '.join(NEURON_CONFIG_DTYPES)}, got {name!r}; "
            "NxDI takes weights of any other name for int8."
        )
    return NEURON_CONFIG_DTYPES[name]


INT8_STEPS_PER_TENSOR = 127.5  # from -128 to 127, halved
FP8_FLOOR = 1e-5
Weights = Tuple[torch.Tensor, torch.Tensor]  # quantised [out, in], and fp32 scale
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def quantize_int8(weight: torch.Tensor, per_channel: bool) -> Weights:
    """Weights [out, in] as int8, and their scale, (1,) or (out, 1). PyTorch multiplies by the
    reciprocal of the scale, which decides ties."""
    weight = weight.to(torch.float32)
    amax = weight.abs().amax(dim=1, keepdim=True) if per_channel else weight.abs().amax().reshape(1)
    steps = 127.0 if per_channel else INT8_STEPS_PER_TENSOR
    scale = (amax / steps).clamp_min(torch.finfo(torch.float32).eps)
    return (weight * (1.0 / scale)).round().clamp(-128, 127).to(torch.int8), scale


def _to_fp8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast to fp8; a row of zeros with the scale 0 stays zeros, where NxD makes NaN."""
    most, least = DtypeBound.from_torch_dtype(dtype)
    return torch.nan_to_num(weight / scale).clamp(least, most).to(dtype)


def quantize_fp8_per_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> Weights:
    """Weights [out, in] as fp8, and one scale ()."""
    tensor = tensor.to(torch.float32)
    scale = tensor.abs().amax() / DtypeBound.from_torch_dtype(dtype)[0]
    return _to_fp8(tensor, scale, dtype), scale


def quantize_fp8_per_channel(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    channel_axis: int,
    clamp_bound: float = float("inf"),
    floor: float = FP8_FLOOR,
) -> Weights:
    """Weights [...] as fp8, and a scale for each index of `channel_axis`."""
    tensor = tensor.to(torch.float32)
    others = tuple(axis for axis in range(tensor.dim()) if axis != channel_axis)
    amax = tensor.abs().amax(dim=others, keepdim=True).clamp_max(clamp_bound)
    scale = (amax / DtypeBound.from_torch_dtype(dtype)[0]).clamp_min(floor)
    return _to_fp8(tensor, scale, dtype), scale


class QuantizedLinear(nn.Module):
    """The place of an nn.Linear in a Hugging Face model: it holds weights and cannot run. Its
    entries in a state dict are those of NxDI: `weight`, `scale` and, for int8 only, `bias`."""

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: Optional[torch.Tensor]
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.register_parameter("bias", None if weight.dtype in _FLOAT8 else bias)


def _replace_linears(
    model: nn.Module, quantise: Callable[[torch.Tensor], Weights], skipped: List[str]
) -> nn.Module:
    """Replace, in place, every nn.Linear, except where a name contains one of `skipped`."""
    found = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not any(part in name for part in skipped)
    ]
    for done, name in enumerate(found):
        progress.report("quantise", done, len(found))
        parent, _, child = name.rpartition(".")
        linear = model.get_submodule(name)
        weight, scale = quantise(linear.weight.detach())
        setattr(model.get_submodule(parent), child, QuantizedLinear(weight, scale, linear.bias))
    progress.report("quantise", len(found), len(found))
    return model


def quantize_pytorch_model_per_tensor_symmetric(
    float_model: nn.Module, inplace: bool = False, dtype: torch.dtype = torch.int8
) -> nn.Module:
    """Quantise every nn.Linear with one scale, in place whatever `inplace` says."""
    del inplace

    def quantise(weight: torch.Tensor) -> Weights:
        if dtype in _FLOAT8:
            return quantize_fp8_per_tensor(weight, dtype)
        return quantize_int8(weight, per_channel=False)

    return _replace_linears(float_model, quantise, [])


def quantize_pytorch_model_per_channel_symmetric(
    float_model: nn.Module,
    inplace: bool = False,
    dtype: torch.dtype = torch.int8,
    modules_to_not_convert: Optional[List[str]] = None,
    floor: float = FP8_FLOOR,
) -> nn.Module:
    """Quantise every nn.Linear with a scale for each output feature, in place. A name that contains
    one of `modules_to_not_convert` stays in float."""
    del inplace

    def quantise(weight: torch.Tensor) -> Weights:
        if dtype in _FLOAT8:
            return quantize_fp8_per_channel(weight, dtype, 0, floor=floor)
        return quantize_int8(weight, per_channel=True)

    return _replace_linears(float_model, quantise, modules_to_not_convert or [])


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
    weight: Any  # the parallel layer's
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


Mapping = Dict[Callable, type]


def get_default_quant_module_mappings() -> Mapping:
    """Float layer -> quantised layer, by exact type: subclasses stay float."""
    return {ColumnParallelLinear: QuantizedColumnParallel, RowParallelLinear: QuantizedRowParallel}


def convert(
    module: nn.Module,
    q_config: Optional[QConfig] = None,
    inplace: bool = False,
    mapping: Optional[Mapping] = None,
    include: Union[str, List[str], None] = None,
    modules_to_not_convert: Optional[List[str]] = None,
) -> nn.Module:
    """Replace layers by `mapping`, except where a name contains one of `modules_to_not_convert`."""
    if include is not None:
        raise NotImplementedError(
            "convert got include, expected None; name the others in modules_to_not_convert."
        )
    module = module if inplace else copy.deepcopy(module)
    q_config = get_default_custom_qconfig_dict() if q_config is None else q_config
    mapping = get_default_quant_module_mappings() if mapping is None else mapping
    for name, child in list(module.named_modules()):
        if type(child) not in mapping or any(part in name for part in modules_to_not_convert or ()):
            continue
        parent, _, own = name.rpartition(".")
        quantised = mapping[type(child)].from_float(child, q_config)
        setattr(module.get_submodule(parent), own, quantised)
    return module


def direct_cast_quantize(tensor: torch.Tensor, downcast_dtype: torch.dtype) -> torch.Tensor:
    """The tensor cast without a scale. Values beyond 240, the end of Neuron's e4m3, become NaN
    here. Sources leave them open."""
    result = tensor.to(downcast_dtype)
    if downcast_dtype is not torch.float8_e4m3fn:
        return result
    raw = result.view(torch.uint8)
    return torch.where((raw & 0x7F) > 0x77, raw | 0x7F, raw).view(downcast_dtype)


def direct_cast_dequantize(tensor: torch.Tensor, upcast_dtype: torch.dtype) -> torch.Tensor:
    """The tensor cast without a scale; the tensor itself where it has the type already."""
    return tensor.to(upcast_dtype)
