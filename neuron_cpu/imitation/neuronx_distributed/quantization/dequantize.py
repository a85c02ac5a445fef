"""Makes float tensors of quantised ones (NxD, quantization/dequantize.py)."""

import torch


def direct_cast_dequantize(tensor: torch.Tensor, upcast_dtype: torch.dtype) -> torch.Tensor:
    """The tensor cast without a scale; the tensor itself where it has the type already."""
    return tensor.to(upcast_dtype)
