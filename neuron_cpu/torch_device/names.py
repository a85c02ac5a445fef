"""What the newer `torch_neuronx` offers: `wrap_nki`, `nki_op`, and the functions of `torch.neuron`.

Dynamo may look into this file, as programs call `wrap_nki` in what they compile.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from neuron_cpu.core.current.kernel import jit
from neuron_cpu.core.device.errors import warn
from neuron_cpu.core.language.kernel import Kernel
from neuron_cpu.core.language.specialisation import line_of, rebuilt

from .module import *  # noqa: F403
from .tensor import NeuronTensor, own, wrapped


def wrap_nki(kernel: Any) -> Kernel:
    """The kernel to call on tensors of the device; ``wrap_nki(kernel)[2]`` takes both cores.

    A launch grid inside of the brackets is lost: on a device ``wrap_nki(kernel[2])`` runs on one
    core.
    """
    kernel = jit(kernel) if not isinstance(kernel, Kernel) else kernel
    if kernel.grid:
        warn(
            "sim_wrapped_grid",
            f"wrap_nki is called with {kernel.name}[{', '.join(map(str, kernel.grid))}], expected "
            f"the kernel: a device drops that grid; write wrap_nki({kernel.name})"
            f"[{', '.join(map(str, kernel.grid))}]",
            line_of(kernel.function),
        )
        launched = type(kernel)(kernel.function, (), **kernel.options)
        launched.programs, launched.lock = kernel.programs, kernel.lock
        return launched
    return kernel


def nki_op(name: str, fn: Callable | None = None, mutates_args: Any = ()) -> Any:
    """Register a function that calls kernels as the operator ``name`` of PyTorch.

    ``fn`` has type annotations for each parameter and the result, which are its schema; it runs
    with tensors without values, too, to find the results' shapes. ``mutates_args`` names the
    arguments that it writes. The operator has PyTorch's ``register_autograd``.

    Raises:
        ValueError: an annotation is missing, or a name is no parameter.
    """
    if fn is None:
        return functools.partial(nki_op, name, mutates_args=mutates_args)
    if isinstance(fn, Kernel):
        raise ValueError(
            f"nki_op('{name}') is given the kernel {fn.name}, expected a function with annotations "
            "that calls it; define one."
        )
    if "::" not in name:
        raise ValueError(f"nki_op('{name}') lacks a library, expected '::'; write 'mine::{name}'.")
    function: Any = fn
    mutates = mutates_args if isinstance(mutates_args, str) else sorted(mutates_args or ())
    try:
        schema = torch.library.infer_schema(function, mutates_args=mutates)
    except ValueError as error:
        names = ": torch.Tensor, ".join(inspect.signature(function).parameters)
        raise ValueError(
            f"nki_op('{name}') has no schema ({error}), expected types of all parameters and of "
            f"the result; write def {function.__name__}({names}: torch.Tensor) -> torch.Tensor."
        ) from None

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            result = function(*args, **kwargs)
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        return rebuilt(result, lambda one, _: _apart(one, given))

    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    made = torch.library.custom_op(name, run, mutates_args=mutates, schema=schema)
    made.register_fake(run)
    own(made._opoverload, run)
    return made


def _apart(result: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
    """A result of its own: PyTorch's operators may not return arguments, and those of devices do.

    It has the argument's memory.
    """
    if not any(result is one for one in given):
        return result
    if isinstance(result, NeuronTensor):
        return wrapped(result.host, result.device, result.held)
    return torch.empty_like(result) if isinstance(result, FakeTensor) else result.clone()
