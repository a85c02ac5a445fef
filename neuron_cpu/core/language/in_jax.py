"""Kernels in functions that JAX traces: `jax.jit`, loops, `shard_map`.

The traced arrays have no values: the kernel is traced for their shapes, and runs on the host when
JAX calls back with values. JAX is optional, and nothing here imports it before the caller has.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from ..device import dtypes
from ..device.errors import refuse
from .specialisation import Hole, filled, is_jax, is_tensor, line_of


def is_traced(args: tuple, kwargs: dict) -> bool:
    """Whether JAX traces a call with these arguments."""
    jax = sys.modules.get("jax")
    if jax is None:
        return False

    def any_of(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(any_of, value))
        return isinstance(value, jax.core.Tracer)

    return any(map(any_of, (*args, *kwargs.values())))


def call(kernel: Any, args: tuple, kwargs: dict) -> Any:
    """The call as one operation of JAX."""
    arrays: list[Any] = []

    def note(value: Any) -> Any:
        if is_tensor(value):
            arrays.append(value)
            return Hole(len(arrays) - 1)
        if isinstance(value, (list, tuple)):
            return type(value)(map(note, value))
        return value

    form = note(args), {name: note(value) for name, value in sorted(kwargs.items())}

    def run(values: Sequence[Any]) -> Any:
        given, named = filled(form, values)
        return kernel.on_host(*given, **named)

    results = run([torch.empty(x.shape, dtype=_torch(x), device="meta") for x in arrays])
    return operation(kernel, lambda *values: run(list(map(np.array, values))), results, arrays)


def _torch(value: Any) -> torch.dtype:
    return value.dtype if isinstance(value, torch.Tensor) else dtypes.to_dtype(value.dtype).torch


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """Where callbacks run: JAX's own threads end with each of them, and would take plans along."""
    return ThreadPoolExecutor(1)


def operation(kernel: Any, run: Callable, results: Any, arrays: list[Any]) -> Any:
    """`run` on the host, for results of these shapes; no gradient and no batch of it exists."""
    jax = sys.modules["jax"]
    specs = jax.tree.map(_spec, results, is_leaf=lambda one: hasattr(one, "shape"))

    def host(*values: Any) -> Any:
        return _thread().submit(run, *values).result()

    @jax.custom_batching.custom_vmap
    def batched(*values: Any) -> Any:
        return jax.pure_callback(host, specs, *values)

    @batched.def_vmap
    def _batch(*_: Any) -> Any:
        raise refuse(
            "sim_jax_vmap",
            f"jax.vmap batches kernel {kernel.name}, which takes the shapes that it is written "
            "for; give the kernel a batch axis of its own, or loop with jax.lax.map",
            line_of(kernel.function),
        )

    @jax.custom_jvp
    def called(*values: Any) -> Any:
        return batched(*values)

    @called.defjvp
    def _gradient(*_: Any) -> Any:
        raise refuse(
            "sim_jax_gradient",
            f"jax differentiates kernel {kernel.name}, whose derivative nobody gave; call it in "
            "a function under jax.custom_vjp with a backward of its own",
            line_of(kernel.function),
        )

    return called(*[x if is_jax(x) else jax.numpy.asarray(x) for x in arrays])


def _spec(result: Any) -> Any:
    dtype = result.dtype
    if isinstance(dtype, torch.dtype):
        dtype = dtypes.to_dtype(dtype).numpy
    return sys.modules["jax"].ShapeDtypeStruct(tuple(result.shape), dtype)
