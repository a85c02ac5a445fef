"""Operators that the Neuron compiler provides, computed with PyTorch."""

from __future__ import annotations

from typing import Tuple

import torch


class RmsNorm:
    """Root-mean-square norm, called as an autograd function is: `RmsNorm.apply(x, w, eps, dim)`."""

    @staticmethod
    def apply(
        hidden_states: torch.Tensor, weight: torch.Tensor, eps: float, dim: int
    ) -> torch.Tensor:
        """`x * rsqrt(mean(x^2 along dim) + eps) * weight`, computed in the dtype of the input."""
        mean_square = hidden_states.pow(2).mean(dim=dim, keepdim=True)
        return hidden_states * torch.rsqrt(mean_square + eps) * weight


class Argmax:
    """`Argmax.apply(x, dim, keepdim)` -> int64 indices; the first maximum wins."""

    @staticmethod
    def apply(tensor: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
        return torch.argmax(tensor, dim=dim, keepdim=keepdim)


class TopK:
    """`TopK.apply(x, k, dim)` -> values and int64 indices, largest first."""

    @staticmethod
    def apply(tensor: torch.Tensor, k: int, dim: int = -1) -> Tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.topk(tensor, k, dim=dim)
        return values, indices
