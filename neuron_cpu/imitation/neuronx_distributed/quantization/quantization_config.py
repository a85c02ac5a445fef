"""The enumerations of NxD's weight quantisation, and the settings of a conversion."""

from __future__ import annotations

from enum import Enum
from typing import Any, Dict, Optional, Union

import torch


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
