"""``nki.simulator``: what vLLM Neuron's CPU mode calls (vllm-neuron, nki_cpu_simulator.md)."""

# Written by stubs/generate.py.
from typing import Any


def simulate_kernel(kernel: Any, args: Any = (), kwargs: Any = None, _lnc: Any = 1) -> Any:
    """Run a kernel, or a function as one, on numpy arrays with ``_lnc`` cores."""
