"""What the device changes of PyTorch's own functions, each by one function around it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from neuron_cpu import announce

from .dynamo import Call


def around(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Put a function around one of PyTorch's, which it gets as its first argument."""
    theirs = getattr(owner, name)

    def put(ours: Callable) -> Callable:
        @functools.wraps(theirs)
        def call(*args: Any, **kwargs: Any) -> Any:
            return ours(theirs, *args, **kwargs)

        setattr(owner, name, call)
        return ours

    return put


@around(torch.nn.Module, "_apply")
def _move(theirs: Any, self: Any, fn: Any, recurse: bool = True) -> Any:
    """A module's move to the device or from it: its parameters stay the same objects, which
    optimisers and ties hold, unless a graph of autograd holds them, too. Elsewhere PyTorch's own
    way stands, which also keeps attributes of parameters."""
    if not _concerns_device(self, fn):
        return theirs(self, fn, recurse)
    before = torch.__future__.get_swap_module_params_on_conversion()
    try:
        torch.__future__.set_swap_module_params_on_conversion(True)
        return theirs(self, fn, recurse)
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
        torch.__future__.set_swap_module_params_on_conversion(False)
        return theirs(self, fn, recurse)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _concerns_device(module: torch.nn.Module, fn: Callable) -> bool:
    """Whether `fn` takes tensors of a module to the device, or from it."""
    for own in module.parameters(recurse=False):
        with contextlib.suppress(Exception), torch.no_grad():  # the move itself says what is wrong
            moved = fn(torch.empty(0, dtype=own.dtype, device=own.device))
            return "neuron" in (own.device.type, moved.device.type)
    return False


def _set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    """`x.data = value`: PyTorch's own setter changes no device, so the two tensors swap all."""
    if "neuron" not in (self.device.type, value.device.type) or self.device == value.device:
        return _DATA.__set__(self, value)
    new: Any = value.detach().requires_grad_(self.requires_grad)
    if isinstance(self, torch.nn.Parameter):
        new = torch.nn.Parameter(new, self.requires_grad)
    if self.grad is not None:
        new.grad = self.grad.to(new.device, new.dtype)
    return torch.utils.swap_tensors(self, new)


_DATA: Any = torch._C.TensorBase.data
torch.Tensor.data = property(_DATA.__get__, _set_data)  # type: ignore[assignment, arg-type]


@around(torch.autograd, "_engine_run_backward")
def _backward(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Backward without a thread for the device, which could outlive the interpreter."""
    with torch.autograd.set_multithreading_enabled(False):
        return theirs(*args, **kwargs)


@around(torch, "compile")
def _compile(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.compile` that knows kernels and the backend."""
    announce.room("backend").register()
    return theirs(*args, **kwargs)


@around(torch._TorchCompileInductorWrapper, "__call__")
def _default_backend(theirs: Any, self: Any, graph: Any, inputs: Any, **kwargs: Any) -> Any:
    """The backend that nobody named: on the device it is the device's."""
    if "neuron" in {one.device.type for one in inputs if isinstance(one, torch.Tensor)}:
        return announce.room("backend").compiled(graph, inputs)
    if any(isinstance(node.target, Call) for node in graph.graph.nodes):  # a kernel on the host
        return graph.forward
    return theirs(self, graph, inputs, **kwargs)
