"""Operators of the Neuron compiler, computed with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from neuronxcc import nki

from neuron_cpu.errors import CompileError


class RmsNorm:
    """Root-mean-square norm, with an autograd function's call: `RmsNorm.apply(x, w, eps, dim)`."""

    @staticmethod
    def apply(
        hidden_states: torch.Tensor, weight: torch.Tensor, eps: float, dim: int
    ) -> torch.Tensor:
        """`x * rsqrt(mean(x^2 along dim) + eps) * weight`, computed in the input's dtype."""
        mean_square = hidden_states.pow(2).mean(dim=dim, keepdim=True)
        return hidden_states * torch.rsqrt(mean_square + eps) * weight


class Argmax:
    """`Argmax.apply(x, dim, keepdim)` -> int64 indices; a tie goes to the first maximum."""

    @staticmethod
    def apply(tensor: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
        return torch.argmax(tensor, dim=dim, keepdim=keepdim)


class TopK:
    """`TopK.apply(x, k, dim)` -> values and int64 indices, largest first."""

    @staticmethod
    def apply(tensor: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        size = tensor.shape[dim]
        if k > size:
            raise CompileError(
                f"TopK asks for {k} of {size} elements, expected at most {size}, which a sampler "
                "on the device has of a rank's vocabulary; lower global_topk (--global-topk)."
            )
        values, indices = torch.topk(tensor, k, dim=dim)
        return values, indices


class Softmax:
    """`Softmax.apply(x, dim)`, computed in the input's dtype."""

    @staticmethod
    def apply(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.softmax(tensor, dim=dim)


class ConcatenateOp:
    """`ConcatenateOp.apply(a, b, dim=)`."""

    @staticmethod
    def apply(*tensors: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat(tensors, dim=dim)


def neuron_layer(layer: Any) -> Any:
    """A mark for the compiler on a class of layers; it has no effect here."""
    return layer


def xla_hlo_call(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Make a function of tensors from a function that writes HLO.

    It knows the HLO that NxDI writes by hand (modules/kvcache/utils.py, generation/sampling.py):
    constants, uniform random numbers, and DynamicUpdateSlice. That last one moves a start that
    would leave the tensor back into it.
    """

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return function(*map(_Operand, tensors)).tensor

    return call


class _Operand:
    """A tensor, as a function that writes HLO sees it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.sizes = tensor, tuple(tensor.shape)
        self.dtype = _Type(tensor.dtype)
        self.scribe = _Scribe()

    def CustomCall(self, *operands: _Operand, custom_call_target: Any) -> Any:
        return _marked(operands, custom_call_target)


class _Scribe:
    """Element types by their names in HLO."""

    u32 = property(lambda self: _Type(torch.int32))
    s32 = u32

    @staticmethod
    def tuple(*operands: _Operand) -> SimpleNamespace:
        """The type of several results."""
        return SimpleNamespace(
            CustomCall=lambda *given, custom_call_target: _marked(given, custom_call_target)
        )


def _marked(operands: Sequence[_Operand], target: Any) -> Any:
    """Operands at which the compiler learns where a layer begins or ends."""
    name = str(target)
    if "ModuleMarker" not in name:
        raise NotImplementedError(
            f"HLO's CustomCall of {name}, expected the marker of a layer; call a kernel of your "
            "own instead."
        )
    tensors = tuple(operand.tensor for operand in operands)
    return SimpleNamespace(tensor=tensors if len(tensors) > 1 else tensors[0])


@dataclass(eq=False)
class _Type:
    """An element type, and with `[sizes]` the shape that an operator is asked for."""

    _dtype: torch.dtype
    _sizes: tuple[int, ...] = ()

    def __getitem__(self, sizes: Any) -> _Type:
        return _Type(self._dtype, tuple(sizes))

    def Constant(self, constant_value: float) -> _Operand:
        return _Operand(torch.tensor(constant_value, dtype=self._dtype))

    def Rng(self, low: _Operand, high: _Operand, distribution: int) -> _Operand:
        if distribution != 1:
            raise NotImplementedError(
                f"HLO's Rng of distribution {distribution}, expected 1, the uniform one; draw "
                "normal numbers with torch.randn."
            )
        drawn = torch.rand(self._sizes, dtype=self._dtype)
        return _Operand(low.tensor + (high.tensor - low.tensor) * drawn)

    def DynamicUpdateSlice(self, tensor: _Operand, update: _Operand, *starts: _Operand) -> _Operand:
        places: list[torch.Tensor | None] = []
        for axis, start in enumerate(starts):
            length, room = update.sizes[axis], tensor.sizes[axis] - update.sizes[axis]
            place = start.tensor.reshape(()).clamp(0, room) + torch.arange(length)
            form = [1] * len(update.sizes)
            form[axis] = length
            places.append(place.reshape(form))
        return _Operand(tensor.tensor.index_put(places, update.tensor))


class nki_jit:
    """The older call of a kernel: `nki_jit()(kernel)[grid](inputs..., outputs..., constants)`.

    `@nki_jit` without parentheses is the same. The kernel stores into its arguments and returns no
    tensor. The call writes the caller's tensors in place and returns the last one.
    """

    def __new__(cls, *options: Any, **keyword_options: Any) -> Any:
        if len(options) == 1 and callable(options[0]):
            return _OutputArgumentKernel(nki.jit(options[0], kernel_return=False))
        return super().__new__(cls)

    def __init__(self, *options: Any, **keyword_options: Any) -> None:
        del options, keyword_options  # targets of the device compiler

    def __call__(self, kernel: Callable[..., Any]) -> _OutputArgumentKernel:
        return _OutputArgumentKernel(nki.jit(kernel, kernel_return=False))


class _OutputArgumentKernel:
    """A kernel that stores into its arguments; a call returns the last tensor."""

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted
        self.function = jitted.function

    def __getitem__(self, grid: Any) -> _OutputArgumentKernel:
        return _OutputArgumentKernel(self._jitted[grid])

    def __call__(self, *args: Any, kernel_name: str | None = None, **kwargs: Any) -> Any:
        del kernel_name  # names the custom call in the device's graph
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not tensors:
            raise TypeError(
                f"{self._jitted.name} was called without a tensor, expected its inputs and the "
                "output tensor as the last one; pass the output by position."
            )
        self._jitted(*args, **kwargs)
        return tensors[-1]
