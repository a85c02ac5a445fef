"""``neuronxcc.nki``: decorators and runners of SDK 2.21 over the simulated NeuronCore.

Source of names and signatures: aws-neuron-sdk v2.21.1, general/nki/api/nki/__init__.py.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from neuron_cpu.core.device import unknown as _unknown
from neuron_cpu.core.language.kernel import Kernel
from neuron_cpu.core.language.specialisation import returns_value
from neuron_cpu.core.language.operands import fitted as _fitted
from neuron_cpu.core.language.runners import benchmark, profile
from neuron_cpu.core.language.tensor import Tile as tensor
from neuron_cpu.core.program.digest import fingerprint as _fingerprint
from neuron_cpu.core.program.program import Program
from neuron_cpu.inline import attach as _attach

from . import compiler, isa, language, typing

__all__ = [
    "FrameworkKernel", "baremetal", "benchmark", "compiler", "isa", "jit", "language", "profile",
    "simulate_kernel", "tensor", "trace", "typing",
]  # fmt: skip

benchmark, profile = _fitted(benchmark), _fitted(profile)
_attach(Kernel)
__getattr__ = _unknown.of_module("nki", globals(), current=False)

# The compiler adds this level: harnesses of a Stanford course say logging.disable(logging.OFF).
if not hasattr(logging, "OFF"):
    logging.OFF = logging.CRITICAL + 10  # type: ignore[attr-defined]
    logging.addLevelName(logging.OFF, "OFF")  # type: ignore[attr-defined]

PLATFORMS = ("trn1", "inf2", "trn2", "trn3")
WITHOUT_FRAMEWORK = ("baremetal", "simulation", "trace")
MODES = ("auto", "torchxla", "jax", "baremetal", "benchmark", "simulation", "trace")


class FrameworkKernel(Kernel):
    """The base of a framework's own binding: it traces a kernel for its kind of tensors.

    Outputs are the kernel's last parameters.
    Source: aws-neuron/transformers-neuronx 1ade6d7, nki/compile.py.

    Attributes:
        traced: every program that this process traced, by its fingerprint.
    """

    traced: dict[str, Program] = {}

    def __init__(self, func_name: str, func: Callable, grid: Sequence[int] = (), **_: Any) -> None:
        super().__init__(func, tuple(grid), kernel_return=False)

    def map_framework_tensor(self, tensor: Any) -> tuple[Sequence[int], Any]:
        """The shape and the type of one of its tensors: a subclass says it."""
        raise NotImplementedError

    def translate_to_neuron_dtype(self, dtype: Any) -> Any:
        """Numpy's type of one of its types: a subclass says it."""
        raise NotImplementedError

    def dump_config(self, *tensors: Any) -> tuple[str, list[str], list[str]]:
        """Trace and check the kernel: the fingerprint, and the names of inputs and outputs."""
        arrays = []
        for each in tensors:
            shape, dtype = self.map_framework_tensor(each)
            arrays.append(np.empty(shape, self.translate_to_neuron_dtype(dtype)))
        program = self.trace(*arrays)
        key = _fingerprint(program)
        self.traced[key] = program
        written = {storage.name for storage in program.outputs}
        names = [storage.name for storage in program.inputs]
        return key, [n for n in names if n not in written], [n for n in names if n in written]


def jit(func: Callable | None = None, mode: str = "auto", **options: Any) -> Any:
    """Make a kernel of ``func``: ``@nki.jit``, ``@nki.jit()`` or ``nki.jit(f, mode=)``.

    A kernel returns torch tensors for torch tensors, and numpy arrays for numpy arrays. Every mode
    runs on the simulator; ``mode="benchmark"`` is ``nki.benchmark``. ``kernel_return=False`` means
    the old convention, where outputs are parameters that the kernel writes in place. So does a
    function without ``return`` in the modes without a framework graph. ValueError for an unknown
    mode or platform.
    """
    __tracebackhide__ = True
    if mode not in MODES:
        raise ValueError(
            f"nki.jit mode {mode!r}, expected one of {', '.join(MODES)}; leave mode= out"
        )
    if options.get("platform_target", "trn1") not in PLATFORMS:
        raise ValueError(
            f"nki.jit platform_target {options['platform_target']!r}, expected one of "
            f"{', '.join(PLATFORMS)}; name one of them"
        )
    if func is None:
        return lambda f: jit(f, mode, **options)
    if mode == "benchmark":
        return benchmark(func, **options)
    if isinstance(func, Kernel):  # decorated twice: the outer mode and options win
        inner = {k: v for k, v in func.options.items() if k != "mode"}
        made = jit(func.function, mode, **{**inner, **options})
        return made[func.grid] if func.grid else made
    if mode in WITHOUT_FRAMEWORK and callable(func):  # else the kernel refuses it
        options.setdefault("kernel_return", returns_value(func))
    return Kernel(func, mode=mode, **options)


@_fitted
def baremetal(kernel: Callable | None = None, **options: Any) -> Any:
    """Run a kernel without a framework: numpy in, numpy out. Nothing is compiled, so file names of
    compiler artifacts have no effect."""
    return jit(kernel, "baremetal", **options)


def trace(func: Callable | None = None, **options: Any) -> Any:
    """Make a kernel that only other kernels call: ``@nki.trace``, or with options."""
    return jit(func, "trace", **options)


def simulate_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``kernel`` (decorated or plain) on numpy arrays and return numpy arrays. Output
    parameters of kernels of the old convention are filled in place."""
    made = kernel if isinstance(kernel, Kernel) else jit(kernel, "simulation")
    if made.options.get("mode") in ("auto", "torchxla") and not returns_value(made.function):
        made = Kernel(made.function, made.grid, mode="simulation", kernel_return=False)
    return made(*args, **kwargs)
