"""The SDK's closed kernels. A kernel runs if it has a file here; any other refuses a call."""

from typing import Any

from neuron_cpu.closed import Closed


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Closed(f"{__name__}.{name}")
