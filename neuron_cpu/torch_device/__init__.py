"""PyTorch's device `neuron` on a CPU: tensors, kernels, compiled graphs, processes, a report.

`neuron_cpu.announce` names the device; whatever a program then uses of it loads this package.
"""

import functools
from typing import Any

import torch

from neuron_cpu import announce

from . import autocast

announce.neuron()
# A module's parameters stay the same objects when they move: optimisers and ties hold them.
torch.__future__.set_swap_module_params_on_conversion(True)
autocast.install()

_run_backward = torch.autograd._engine_run_backward


@functools.wraps(_run_backward)
def _in_this_thread(*args: Any, **kwargs: Any) -> Any:
    """Backward without a thread for the device, which could outlive the interpreter."""
    with torch.autograd.set_multithreading_enabled(False):
        return _run_backward(*args, **kwargs)


torch.autograd._engine_run_backward = _in_this_thread

_compile = torch.compile


@functools.wraps(_compile)
def _compile_with_kernels(*args: Any, **kwargs: Any) -> Any:
    """`torch.compile` that knows kernels, and takes `neuron` for graphs on the device."""
    announce.room("backend").register()
    return _compile(*args, **kwargs)


torch.compile = _compile_with_kernels  # type: ignore[assignment]
_inductor = torch._TorchCompileInductorWrapper.__call__


@functools.wraps(_inductor)
def _backend_of(self: Any, graph: Any, inputs: Any, **kwargs: Any) -> Any:
    places = {one.device.type for one in inputs if isinstance(one, torch.Tensor)}
    if "neuron" in places:
        return announce.room("backend").compiled(graph, inputs)
    return _inductor(self, graph, inputs, **kwargs)


torch._TorchCompileInductorWrapper.__call__ = _backend_of  # type: ignore[method-assign]
