"""Float tensors from quantised ones (NxD, quantization/dequantize.py)."""

import torch


def direct_cast_dequantize(tensor: torch.Tensor, upcast_dtype: torch.dtype) -> torch.Tensor:
    """A cast without a scale; the tensor itself where it has that type."""
    return tensor.to(upcast_dtype)
