"""Builds a model without memory for its weights, which the checkpoint brings afterwards."""

import threading
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from neuron_cpu.core.device.errors import within
from neuron_cpu.errors import CompileError

_state = threading.local()


def parameter_device() -> torch.device | None:
    """The device on which parallel layers allocate: meta inside `deferred_parameters`."""
    return torch.device("meta") if getattr(_state, "deferred", False) else None


def _without_value(
    module: nn.Module, name: str, parameter: nn.Parameter | None
) -> nn.Parameter | None:
    """The parameter on the meta device, or None to leave the parameter unchanged.

    CompileError for a parameter with tags: NxD's `init_on_device` would hand these tags to its
    class as arguments, and the class takes none of them.
    """
    if parameter is None or parameter.is_meta or not getattr(_state, "deferred", False):
        return None
    if parameter.__dict__:
        raise CompileError(
            f"Parameter {name} of {type(module).__name__} has {', '.join(parameter.__dict__)} "
            "before the module has it, expected no attribute yet, with which NxD cannot make it "
            "anew; assign the parameter first, then tag what the module holds."
        )
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=False)


# Once and for the process: PyTorch's table of hooks must not change while other threads build.
register_module_parameter_registration_hook(_without_value)


def deferred_parameters() -> AbstractContextManager[None]:
    """Inside the block, parameters that this thread registers become meta tensors. Buffers keep
    their values: a buffer is a constant of the graph, and no checkpoint holds it."""
    return within(_state, deferred=True)
