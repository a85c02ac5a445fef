"""Kernels that the SDK keeps closed, but for those beside this file; others refuse to be called."""

from typing import Any

from neuron_cpu.closed import Closed


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Closed(f"{__name__}.{name}")
