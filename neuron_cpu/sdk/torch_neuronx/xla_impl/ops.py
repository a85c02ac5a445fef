"""Operators that the Neuron compiler provides, computed with PyTorch."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional, Tuple

import torch
from neuronxcc import nki
from neuronxcc.nki import language as nl


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


class nki_jit:
    """The older way to call a kernel: `nki_jit()(kernel)[grid](inputs..., output, constants...)`.

    `@nki_jit` without parentheses is the same. The last tensor argument is the output: the kernel
    stores into it instead of returning it, and the call writes the caller's tensor in place and
    returns that.
    """

    def __new__(cls, *options: Any, **keyword_options: Any) -> Any:
        if len(options) == 1 and callable(options[0]):
            return _OutputArgumentKernel(options[0])
        return super().__new__(cls)

    def __init__(self, *options: Any, **keyword_options: Any) -> None:
        del options, keyword_options  # targets of the device compiler

    def __call__(self, kernel: Callable[..., Any]) -> _OutputArgumentKernel:
        return _OutputArgumentKernel(kernel)


class _OutputArgumentKernel:
    """A kernel that stores into its last tensor argument, called through `nki.jit`."""

    def __init__(self, kernel: Callable[..., Any], jitted: Any = None) -> None:
        self._kernel = kernel
        self._jitted = nki.jit(_returning_output(kernel)) if jitted is None else jitted

    def __getitem__(self, grid: Any) -> _OutputArgumentKernel:
        return _OutputArgumentKernel(self._kernel, self._jitted[grid])

    def __call__(self, *args: Any, kernel_name: Optional[str] = None, **kwargs: Any) -> Any:
        del kernel_name  # names the custom call in the device's graph
        where = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        if not where:
            raise TypeError(
                f"{self._kernel.__name__} was called without a tensor, expected its inputs and the "
                "output tensor as the last one; pass the output by position."
            )
        output = args[where[-1]]
        inputs = [arg for i, arg in enumerate(args) if i != where[-1]]
        layout = (where[-1], tuple(output.shape), str(output.dtype).replace("torch.", ""))
        result = self._jitted(*inputs, _output_layout=layout, **kwargs)
        if not output.is_meta:
            output.copy_(result)
        return output


def _returning_output(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` with its output argument turned into a returned shared_hbm tensor."""

    @functools.wraps(kernel)
    def returning(*inputs: Any, _output_layout: Tuple[int, Tuple[int, ...], str], **kwargs: Any):
        position, shape, dtype = _output_layout
        output = nl.ndarray(shape, dtype=getattr(nl, dtype), buffer=nl.shared_hbm)
        kernel(*inputs[:position], output, *inputs[position:], **kwargs)
        return output

    return returning
