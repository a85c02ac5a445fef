"""Replaces the parallel layers of a built model by quantised ones (NxD,
quantization/quantize.py)."""

import copy
from typing import Callable, Dict, List, Optional, Union

import torch
from torch import nn

from ..parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from .quantization_config import QConfig, get_default_custom_qconfig_dict
from .quantization_layers import QuantizedColumnParallel, QuantizedRowParallel

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
