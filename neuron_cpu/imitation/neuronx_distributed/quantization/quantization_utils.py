"""Quantised weights from float ones, and quantised Linear layers in a Hugging Face model.

Rules, as NxD has them (quantization/quantization_utils.py and observer.py; int8 per tensor is
PyTorch's default dynamic quantisation). amax is the largest absolute weight, of the tensor or of a
row; all arithmetic is in fp32:

    int8 per tensor     scale amax / 127.5           round half to even, clamp to -128 .. 127
    int8 per channel    scale amax / 127, at least the fp32 epsilon; the same rounding
    fp8 per tensor      scale amax / 240             clamp to +-240, cast
    fp8 per channel     scale amax / 240, from NxD 0.11 on at least 1e-5; the same
"""

from typing import Callable, List, Optional, Tuple

import torch
from torch import nn

from neuron_cpu.console import progress

from .quantization_config import DtypeBound

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
