"""Casts of keys and values to a byte, and names of quantised weights, which the library alone has.

Source: aws-neuron/neuronx-distributed, src/neuronx_distributed/quantization; the package's table
names its modules.
"""

import torch

from neuron_cpu.libraries import only_of_the_library

QuantizationType = only_of_the_library("QuantizationType")
QuantizedDtype = only_of_the_library("QuantizedDtype")
QuantizedColumnParallel = only_of_the_library("QuantizedColumnParallel")
QuantizedRowParallel = only_of_the_library("QuantizedRowParallel")


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
