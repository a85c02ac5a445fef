"""PyTorch's functions of several steps, written out: what a kernel computes on its way to them."""

from typing import Any

import torch
from torch import Tensor


def softmax(input: Tensor, dim: int = -1) -> Tensor:
    shifted = input - input.amax(dim, keepdim=True)
    exp = torch.exp(shifted)
    return exp / exp.sum(dim, keepdim=True)


def log_softmax(input: Tensor, dim: int = -1) -> Tensor:
    shifted = input - input.amax(dim, keepdim=True)
    return shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))


def silu(input: Tensor) -> Tensor:
    return input * torch.sigmoid(input)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    inner = input + 0.044715 * input**3
    tanh = torch.tanh(inner * 0.7978845608028654)
    erf = torch.erf(input * 0.7071067811865476)
    return 0.5 * input * (1.0 + (erf if approximate == "none" else tanh))


def layer_norm(
    input: Tensor,
    shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    centred = input - input.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)
    scaled = scaled if weight is None else scaled * weight
    return scaled if bias is None else scaled + bias


def rms_norm(
    input: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    scaled = input / torch.sqrt((input * input).mean(-1, keepdim=True) + eps)
    return scaled if weight is None else scaled * weight


WRITTEN: dict[str, Any] = {
    one.__name__: one for one in (softmax, log_softmax, silu, gelu, layer_norm, rms_norm)
}
