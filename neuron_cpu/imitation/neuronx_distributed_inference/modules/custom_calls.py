"""Modules around operators that the compiler provides."""

import torch
from torch import nn
from torch_neuronx.xla_impl.ops import RmsNorm


class CustomRMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in fp32; results have the input's dtype.
    `hidden_size=None` (NxDI 0.6) leaves the weight out."""

    def __init__(self, hidden_size: int | None = None, eps: float = 1e-6) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        if hidden_size is None:
            self.register_parameter("weight", None)
        else:
            self.weight = nn.Parameter(torch.ones(hidden_size), requires_grad=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        original = hidden_states.dtype
        hidden_states = hidden_states.float()
        weight = self.weight if self.weight is not None else hidden_states.new_ones(())
        result = RmsNorm.apply(
            hidden_states, weight.float(), self.variance_epsilon, hidden_states.ndim - 1
        )
        return result.to(original)
