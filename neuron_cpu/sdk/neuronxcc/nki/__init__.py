"""``neuronxcc.nki``: decorators and runners of SDK 2.21 over the simulated NeuronCore.

Source of names and signatures: aws-neuron-sdk v2.21.1, general/nki/api/nki/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neuron_cpu.core.kernel import Kernel
from neuron_cpu.core.runners import benchmark, profile
from neuron_cpu.core.tensor import Tensor as tensor  # noqa: N813 - the SDK's class name

__all__ = ["baremetal", "benchmark", "jit", "profile", "simulate_kernel", "tensor", "trace"]

MODES = ("auto", "torchxla", "jax", "baremetal", "benchmark", "simulation", "trace")


def jit(func: Callable | None = None, mode: str = "auto", **options: Any) -> Any:
    """Make a kernel of ``func``; usable as ``@nki.jit``, ``@nki.jit()`` and ``nki.jit(f, mode=)``.

    Called with torch tensors it returns torch tensors, with numpy arrays numpy arrays; every mode
    runs on the simulator here. ``mode="benchmark"`` is ``nki.benchmark``.
    """
    if mode not in MODES:
        raise ValueError(f"nki.jit mode {mode!r}, expected one of {', '.join(MODES)}")
    if func is None:
        return lambda f: jit(f, mode, **options)
    if mode == "benchmark":
        return benchmark(func, **options)
    return Kernel(func, mode=mode, **options)


def baremetal(kernel: Callable | None = None, **options: Any) -> Any:
    """Run without a framework: numpy in, numpy out; file names of compiler artifacts are ignored,
    as nothing is compiled here."""
    return jit(kernel, "baremetal", **options)


def trace(func: Callable) -> Kernel:
    """A kernel that is only called from inside another kernel."""
    return jit(func, mode="trace")


def simulate_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``kernel`` (decorated or plain) on numpy arrays and return numpy arrays."""
    made = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    return made(*args, **kwargs)
