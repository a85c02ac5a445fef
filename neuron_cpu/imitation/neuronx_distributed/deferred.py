"""Building a model without memory for its weights, which come from the checkpoint afterwards."""

import threading
from contextlib import contextmanager
from typing import Iterator, Optional

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from neuron_cpu.errors import CompileError

_state = threading.local()


def parameter_device() -> Optional[torch.device]:
    """Where parallel layers allocate: meta inside `deferred_parameters`, else the default."""
    return torch.device("meta") if getattr(_state, "depth", 0) else None


def _without_value(
    module: nn.Module, name: str, parameter: Optional[nn.Parameter]
) -> Optional[nn.Parameter]:
    """The parameter on the meta device; None leaves it as it is.

    CompileError for one with tags: NxD's `init_on_device` hands `parameter.__dict__` to its class
    as arguments, which takes none of them.
    """
    if parameter is None or parameter.is_meta or not getattr(_state, "depth", 0):
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


@contextmanager
def deferred_parameters() -> Iterator[None]:
    """Inside the block, parameters that this thread registers become meta tensors.

    Buffers keep their values: they are constants of the graph, no checkpoint holds them.
    """
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        yield
    finally:
        _state.depth -= 1
