"""Linear layers of all experts at once, sharded across ranks (NxD's names)."""

from typing import Optional

import torch

from ...parallel_layers.layers import BaseParallelLinear, _sharded_parameter
from ...parallel_layers.utils import divide


class _ExpertLinear(BaseParallelLinear):
    """`forward(x (E or 1, T, K))` -> (E, T, N): the product of each expert with its own weight."""

    sharded_dim: int

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
        size = self._group_of(None).size()
        shape = [num_experts, input_size, output_size]
        shape[self.sharded_dim] = divide(shape[self.sharded_dim], size)
        self.weight = _sharded_parameter(
            tuple(shape), self.sharded_dim, stride, size, dtype, device, self._init_weight
        )

    def forward(
        self, input_: torch.Tensor, expert_indices: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """All experts' products (E, T, N), or (n, T, N) of ``expert_indices`` (n,)."""
        return torch.matmul(
            input_, self.weight if expert_indices is None else self.weight[expert_indices]
        )


class ExpertFusedColumnParallelLinear(_ExpertLinear):
    """The outputs are sharded: weight (E, input, output/tp). `stride` s means s fused matrices."""

    sharded_dim = 2


class ExpertFusedRowParallelLinear(_ExpertLinear):
    """The inputs are sharded: weight (E, input/tp, output). Results are partial sums of a rank."""

    sharded_dim = 1
