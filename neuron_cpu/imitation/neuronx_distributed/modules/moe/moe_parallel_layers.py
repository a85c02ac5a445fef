"""Linear layers of all experts at once, sharded across ranks (NxD's names)."""

from typing import Optional, Tuple

import torch

from ...deferred import parameter_device
from ...parallel_layers.layers import BaseParallelLinear
from ...parallel_layers.utils import divide, set_tensor_model_parallel_attributes


class _ExpertLinear(BaseParallelLinear):
    """`forward(x (E or 1, T, K))` -> (E, T, N): the product of each expert with its own weight."""

    def _make(
        self,
        shape: Tuple[int, int, int],
        dim: int,
        stride: int,
        dtype: torch.dtype,
        device: Optional[torch.device],
    ) -> None:
        size = self._group_of(None).size()
        local = list(shape)
        local[dim] = divide(shape[dim], size)
        weight = torch.empty(local, dtype=dtype, device=parameter_device() or device)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        set_tensor_model_parallel_attributes(self.weight, True, dim, stride, size)
        if not self.weight.is_meta:
            self._init_weight(self.weight)

    def forward(
        self, input_: torch.Tensor, expert_indices: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """All experts' products (E, T, N), or (n, T, N) of ``expert_indices`` (n,)."""
        return torch.matmul(
            input_, self.weight if expert_indices is None else self.weight[expert_indices]
        )


class ExpertFusedColumnParallelLinear(_ExpertLinear):
    """The outputs are sharded: weight (E, input, output/tp). `stride` s means s fused matrices."""

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: Optional[torch.device] = None,
        stride: int = 1,
    ) -> None:
        super().__init__()
        self._make((num_experts, input_size, output_size), 2, stride, dtype, device)


class ExpertFusedRowParallelLinear(_ExpertLinear):
    """The inputs are sharded: weight (E, input/tp, output). Results are partial sums of a rank."""

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: Optional[torch.device] = None,
    ) -> None:
        super().__init__()
        self._make((num_experts, input_size, output_size), 1, 1, dtype, device)
