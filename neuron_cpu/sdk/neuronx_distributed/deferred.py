"""Building a model without memory for its weights, which come from the checkpoint afterwards."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Iterator, Optional

import torch
from torch import nn

_state = threading.local()
_original_register = nn.Module.register_parameter


def parameter_device() -> Optional[torch.device]:
    """Where parallel layers allocate: meta inside `deferred_parameters`, else the default."""
    return torch.device("meta") if getattr(_state, "depth", 0) else None


def _register(module: nn.Module, name: str, parameter: Optional[nn.Parameter]) -> None:
    """nn.Module.register_parameter, with the value dropped and its tags kept while deferring."""
    if parameter is not None and not parameter.is_meta and getattr(_state, "depth", 0):
        meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        meta.__dict__.update(parameter.__dict__)
        parameter = meta
    _original_register(module, name, parameter)


@contextmanager
def deferred_parameters() -> Iterator[None]:
    """Inside the block, parameters that this thread registers become meta tensors.

    Buffers keep their values: they are constants of the graph, no checkpoint holds them.
    """
    nn.Module.register_parameter = _register  # other threads pass through to the original
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        yield
    finally:
        _state.depth -= 1
