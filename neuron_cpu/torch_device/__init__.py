"""PyTorch's device `neuron` on a CPU: tensors, kernels, compiled graphs, processes, a report.

`neuron_cpu.announce` names the device; whatever a program then uses of it loads this package.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from neuron_cpu import announce

from . import autocast, kernels  # noqa: F401 - kernels take tensors of the device from here on

announce.neuron()
# A module's parameters stay the same objects when they move: optimisers and ties hold them.
torch.__future__.set_swap_module_params_on_conversion(True)
autocast.install()


def _around(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Put a function around one of PyTorch's, which it gets as its first argument."""
    theirs = getattr(owner, name)

    def put(ours: Callable) -> Callable:
        @functools.wraps(theirs)
        def call(*args: Any, **kwargs: Any) -> Any:
            return ours(theirs, *args, **kwargs)

        setattr(owner, name, call)
        return ours

    return put


@_around(torch.nn.Module, "_apply")
def _move(theirs: Any, self: Any, fn: Any, recurse: bool = True) -> Any:
    """A module's move, also while a graph of autograd holds its parameters: then they are new."""
    try:
        return theirs(self, fn, recurse)
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        return theirs(self, fn, recurse)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(True)


@_around(torch.autograd, "_engine_run_backward")
def _backward(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Backward without a thread for the device, which could outlive the interpreter."""
    with torch.autograd.set_multithreading_enabled(False):
        return theirs(*args, **kwargs)


@_around(torch, "compile")
def _compile(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.compile` that knows kernels and the backend."""
    announce.room("backend").register()
    return theirs(*args, **kwargs)


@_around(torch._TorchCompileInductorWrapper, "__call__")
def _default_backend(theirs: Any, self: Any, graph: Any, inputs: Any, **kwargs: Any) -> Any:
    """The backend that nobody named: on the device it is the device's."""
    places = {one.device.type for one in inputs if isinstance(one, torch.Tensor)}
    if "neuron" in places:
        return announce.room("backend").compiled(graph, inputs)
    return theirs(self, graph, inputs, **kwargs)
