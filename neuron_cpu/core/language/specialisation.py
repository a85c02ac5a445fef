"""Splits the arguments of a kernel call into a specialisation's key and torch tensors.

Shapes, element types and every constant select the Program; the data of tensors do not.
"""

import dataclasses
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..device import dtypes
from ..device.errors import refuse


def is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray)) or is_jax(value)


def is_jax(value: Any) -> bool:
    """Whether it is an array of JAX; JAX is optional, and is not imported here."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def shape_of(value: Any) -> tuple[tuple[int, ...], dtypes.DType]:
    return tuple(value.shape), dtypes.to_dtype(value.dtype)


def constant_key(value: Any) -> Any:
    """Something hashable that stands for a compile-time constant.

    Equal keys must mean equal kernels, so types are part of it: 1, 1.0 and True are equal in Python
    and trace to different instructions.
    """
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(constant_key(v) for v in value))
    if isinstance(value, dict):
        return tuple((k, constant_key(v)) for k, v in sorted(value.items()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return (type(value), constant_key(fields))
    try:
        hash(value)
    except (TypeError, ValueError):  # what may change between calls: the same object is the same
        return _Itself(value)
    return (type(value).__name__, value)


class _Itself:
    """Stands for one unhashable object, and keeps it, so that its id stays its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Hole(int):
    """The place of a tensor among the arguments of a call."""


def filled(value: Any, values: Sequence[Any]) -> Any:
    """Arguments with tensors in place of their holes."""
    if isinstance(value, Hole):
        return values[value]
    if isinstance(value, (list, tuple)):
        items = [filled(one, values) for one in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: filled(one, values) for name, one in value.items()}
    return value


class WrongArguments(TypeError):
    """A call that the parameters of a kernel do not take; the kernel's body has not run."""

    def __init__(self, identifier: str, message: str, source: str) -> None:
        super().__init__(f"{source}: {message} [{identifier}]")
        self.source = source


def check_call(function: Callable, args: tuple, kwargs: dict) -> None:
    """Refuse a call that names too few, too many or unknown arguments.

    Raises:
        WrongArguments: the kernel's parameters do not take the call.
    """
    taken = inspect.signature(function, follow_wrapped=False)
    try:
        taken.bind(*args, **kwargs)
    except TypeError as error:
        raise WrongArguments(
            "sim_arguments",
            f"a call does not fit the parameters ({error}), expected {function.__name__}{taken}; "
            "pass each of them once",
            line_of(function),
        ) from None


def name_argument(function: Callable, key: Callable, args: tuple, kwargs: dict) -> None:
    """Refuse the first argument that ``key`` finds no type for.

    Raises:
        WrongArguments: there is one; its sentence names the parameter.
    """
    names = function.__code__.co_varnames
    for name, value in [*zip(names, args), *kwargs.items()]:
        try:
            key((value,), {})
        except dtypes.UnknownType as error:
            said = f"argument {name}: {error.message}"
            raise WrongArguments(error.identifier, said, line_of(function)) from None


def line_of(function: Callable) -> str:
    """``kernel (file:line)`` of its definition."""
    code = function.__code__
    return f"{function.__name__} ({code.co_filename}:{code.co_firstlineno})"


def flatten(args: tuple, kwargs: dict) -> tuple[list[Any], Any]:
    """Tensors among the arguments, in order, and a key for everything else."""
    tensors: list[Any] = []
    key: list[Any] = []

    def visit(value: Any) -> Any:
        if is_tensor(value):  # data are no part of the key: a Program serves all data of a shape
            tensors.append(value)
            return ("tensor", *shape_of(value))
        if isinstance(value, (list, tuple)) and any(is_tensor(v) for v in value):
            return tuple(visit(v) for v in value)
        return constant_key(value)

    # Keywords by name, as _bind makes the program's inputs: the order of tensors is theirs.
    key.extend(visit(a) for a in args)
    key.extend((k, visit(v)) for k, v in sorted(kwargs.items()))
    return tensors, tuple(key)


def to_torch(value: Any, writes: bool = False) -> torch.Tensor:
    """A contiguous torch tensor over the same memory where types allow.

    With ``writes`` a copy of memory that is read-only.
    """
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise refuse(
                "sim_argument_layout",
                f"a kernel is called with a tensor of layout {value.layout}, expected a dense one; "
                "pass x.to_dense()",
            )
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.requires_grad
        return (value if plain else value.detach()).contiguous()
    # arrays of JAX never change: a kernel that writes one has a copy
    array = _of_jax(value) if is_jax(value) else np.ascontiguousarray(value)
    if writes and not array.flags.writeable:
        array = array.copy()
    dt = dtypes.to_dtype(array.dtype)
    # torch does not know the types of ml_dtypes: their bits pass as integers of the same size.
    if dt is dtypes.BFLOAT16:
        return _over(array.view(np.int16)).view(torch.bfloat16)
    if dt.is_float and dt.itemsize == 1:
        return _over(array.view(np.uint8)).view(dt.torch)
    if dt.kind == "x":
        return _over(array.view(np.dtype(f"i{dt.itemsize}")))
    return _over(array)


def _over(array: np.ndarray) -> torch.Tensor:
    """A tensor over the array; PyTorch's warning of read-only ones is for those who write them."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _of_jax(value: Any) -> np.ndarray:
    """A copy of an array of JAX."""
    return np.array(value)


def from_torch(value: torch.Tensor, dt: dtypes.DType, tensors: list[Any]) -> Any:
    """A result in the kind of a call's tensors: torch's, JAX's or numpy's."""
    if any(isinstance(t, torch.Tensor) for t in tensors):
        return value
    made = to_numpy(value, dt)
    return sys.modules["jax"].numpy.asarray(made) if any(map(is_jax, tensors)) else made


def to_numpy(value: torch.Tensor, dt: dtypes.DType) -> np.ndarray:
    """A numpy array over the tensor's memory, in the ml_dtypes type where there is one."""
    if dt is dtypes.BFLOAT16:
        return value.view(torch.int16).numpy().view(dt.numpy)
    if dt.kind == "x":
        return value.numpy().view(dt.numpy)
    if dt.is_float and dt.itemsize == 1:
        return value.view(torch.uint8).numpy().view(dt.numpy)
    return value.numpy()
