"""``nki.simulator``: what vLLM Neuron's CPU mode calls (vllm-neuron, nki_cpu_simulator.md)."""

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from neuron_cpu.core.current.kernel import jit

__all__ = ["simulate_kernel"]


def simulate_kernel(
    kernel: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, _lnc: int = 1
) -> Any:
    """Run a kernel, or a function as one, on numpy arrays with ``_lnc`` cores."""
    return jit(kernel)[_lnc](*args, **(kwargs or {}))
