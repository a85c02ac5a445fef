"""Results of kernels in a graph of PyTorch: nobody knows their derivative, and backward says so."""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from .specialisation import rebuilt


@functools.cache
def _no_gradient() -> Any:
    """The function of PyTorch; made at the first call, as core is imported without PyTorch too."""

    class NoGradient(torch.autograd.Function):
        """A result that depends on tensors which require a gradient."""

        @staticmethod
        def forward(ctx: Any, name: str, value: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            ctx.name = name
            ctx.mark_dirty(value)  # the result itself, which may be changed in place
            return value

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise RuntimeError(
                f"kernel {ctx.name} has no gradient, expected one for the arguments that require "
                "it; call it in a torch.autograd.Function with a backward of yours (on the device "
                "neuron under nki_op, by register_autograd), or call it under torch.no_grad()."
            )

    return NoGradient


def told(name: str, tensors: Iterable[Any], result: Any) -> Any:
    """A kernel's result as it is, or so that a backward through it raises a RuntimeError."""
    given = [one for one in tensors if isinstance(one, torch.Tensor)]
    need = [one for one in given if one.requires_grad]
    if not need or not torch.is_grad_enabled():
        return result

    def make(value: torch.Tensor, _: str) -> torch.Tensor:
        if any(value is one for one in given) or not value.is_floating_point():
            return value
        return _no_gradient().apply(name, value, *need)

    return rebuilt(result, make)
