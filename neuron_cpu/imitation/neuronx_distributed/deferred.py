"""Building a model without memory for its weights, which come from the checkpoint afterwards."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Iterator, Optional

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_state = threading.local()


def parameter_device() -> Optional[torch.device]:
    """Where parallel layers allocate: meta inside `deferred_parameters`, else the default."""
    return torch.device("meta") if getattr(_state, "depth", 0) else None


def _without_value(
    module: nn.Module, name: str, parameter: Optional[nn.Parameter]
) -> Optional[nn.Parameter]:
    """A parameter on the meta device with the tags of `parameter`; None leaves it as it is."""
    del module, name
    if parameter is None or parameter.is_meta or not getattr(_state, "depth", 0):
        return None
    meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    meta.__dict__.update(parameter.__dict__)
    return meta


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
