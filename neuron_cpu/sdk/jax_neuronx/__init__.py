"""`jax_neuronx`: JAX itself computes on the host; `nki_call` is the older way to call a kernel.

SDK 2.23 ended its support; programs written before call it (AWS Neuron documentation, release notes
of JAX NeuronX).
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from neuron_cpu.core import Kernel
from neuron_cpu.core.language.in_jax import operation

__all__ = ["nki_call"]


def nki_call(
    function: Callable, *args: Any, out_shape: Any, grid: Any = (), **constants: Any
) -> Any:
    """Call a kernel whose last parameters are its outputs: arrays of `out_shape`."""
    sizes = grid if isinstance(grid, tuple) else (grid,)
    kernel = Kernel(getattr(function, "function", function), sizes, kernel_return=False)
    shapes, form = jax.tree.flatten(out_shape)

    def run(*values: Any) -> Any:
        outputs = [np.zeros(one.shape, one.dtype) for one in shapes]
        kernel.on_host(*map(np.array, values), *outputs, **constants)
        return tuple(outputs)

    return jax.tree.unflatten(form, operation(kernel, run, tuple(shapes), list(args)))
