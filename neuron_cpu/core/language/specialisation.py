"""Arguments of a kernel call, as a specialisation's key and torch tensors, and its results.

Shapes, element types and every constant select the Program; the data of tensors do not.
"""

import ast
import dataclasses
import difflib
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

from ..device import dtypes
from ..device.errors import refuse, warn
from ..device.unknown import LAUNCH
from ..program import source
from ..program.index import is_integer
from ..program.program import Program
from ..program.view import View


def is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray)) or is_jax(value)


def is_jax(value: Any) -> bool:
    """Whether it is an array of JAX; JAX is optional, and is not imported here."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def shape_of(value: Any) -> tuple[tuple[int, ...], dtypes.DType]:
    return tuple(value.shape), dtypes.to_dtype(value.dtype)


class TensorKey(str):
    """Stands for a tensor among the constants of a call: its shape and type."""


_PLAIN = frozenset({int, float, bool, str, type(None), TensorKey})


def constant_key(value: Any) -> Any:
    """Something hashable that stands for a compile-time constant.

    Equal keys must mean equal kernels, so types are part of it: 1, 1.0 and True are equal in Python
    and trace to different instructions.
    """
    if type(value) in _PLAIN:
        return type(value).__name__, value
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(constant_key(v) for v in value))
    if isinstance(value, dict):
        return tuple((k, constant_key(v)) for k, v in sorted(value.items()))
    if getattr(type(value), "_by_fields", False):  # equal ones make one specialisation
        return (type(value).__qualname__, constant_key(vars(value)))
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


def filled(value: Any, values: Sequence[Any] | Mapping[int, Any]) -> Any:
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
        for name, value in taken.bind(*args, **kwargs).arguments.items():
            default = taken.parameters[name].default
            if isinstance(value, torch.Tensor) and not value.ndim and isinstance(default, float):
                raise WrongArguments(
                    "sim_arguments",
                    f"argument {name} has no axes, expected a number; write {name}.item()",
                    line_of(function),
                )
    except WrongArguments:
        raise
    except TypeError as error:
        unknown = [name for name in kwargs if name not in taken.parameters]
        needed = [n for n, one in taken.parameters.items() if one.default is one.empty]
        lacking = [name for name in needed[len(args) :] if name not in kwargs]
        told, mend = f"{error}", f"pass {' and '.join(lacking) or 'each of them once'}"
        if len(args) > len(taken.parameters):
            mend = f"pass {len(taken.parameters)}, and take results from what the kernel returns"
        if unknown:
            own = [name for name in [*taken.parameters][len(args) :] if name not in kwargs]
            close = difflib.get_close_matches(unknown[0], taken.parameters, 1) or lacking
            close = close or own * (len(own) == len(unknown) == 1)  # the one that is left
            told = f"no parameter is named {unknown[0]}"
            mend = f"write {close[0]}=" if close else f"leave {unknown[0]}= out"
            mend = LAUNCH.get(unknown[0], mend)
        if "multiple values" in told:
            mend = "write all arguments with their names, or none"
        if args and not kwargs and all(map(is_integer, args)):
            mend = f"choose instances in brackets, {function.__name__}[2](...)"
            if max(args) > 16:
                mend = f"give an array, such as np.zeros({args}, np.float32)"
        raise WrongArguments(
            "sim_arguments",
            f"a call does not fit the parameters ({told}), expected {function.__name__}{taken}; "
            f"{mend}",
            line_of(function),
        ) from None


def name_argument(function: Callable, key: Callable, args: tuple, kwargs: dict) -> None:
    """Refuse the first argument that ``key`` finds no type for.

    Raises:
        WrongArguments: there is one; its sentence names the parameter.
    """
    for name, value in [*zip(function.__code__.co_varnames, args), *kwargs.items()]:
        try:
            key((value,), {})
        except dtypes.UnknownType as error:
            said = f"argument {name}: {error.message}"
            near = said.rpartition("such as ")[2]
            if near in ("int32", "float32"):
                cast = "to(torch" if isinstance(value, torch.Tensor) else "astype(np"
                said += f", {name}.{cast}.{near})"
            if getattr(value, "ndim", 1) == 0:
                said = (
                    f"argument {name} has no axes, expected some or a number; write {name}.item()"
                )
            raise WrongArguments(error.identifier, said, line_of(function)) from None


def line_of(function: Callable) -> str:
    """``kernel (file:line)`` of its definition."""
    code = function.__code__
    return f"{function.__name__} ({code.co_filename}:{code.co_firstlineno})"


def rebuilt(
    value: Any, make: Callable[[Any, str], Any], name: str = "", everywhere: bool = True
) -> Any:
    """``value`` with every tensor in it replaced by ``make(tensor, name)``; itself without any.

    Args:
        everywhere: in dictionaries and objects, too, and not in lists and tuples alone.
    """
    if is_tensor(value):
        return make(value, name)
    if isinstance(value, (list, tuple)):
        items = [rebuilt(v, make, f"{name}[{k}]", everywhere) for k, v in enumerate(value)]
        if all([a is b for a, b in zip(items, value)]):
            return value
        named = hasattr(value, "_fields")  # a NamedTuple takes its fields one by one
        return type(value)(*items) if named else type(value)(items)
    if not everywhere:
        return value
    if isinstance(value, dict):
        return {k: rebuilt(v, make, f"{name}[{k!r}]") for k, v in value.items()}
    holds: dict[str, Any] = getattr(value, "__dict__", {})
    plain = isinstance(value, (type, Enum)) or callable(value)
    if plain or not any(map(is_tensor, holds.values())):
        return value
    made = object.__new__(type(value))
    for key, one in holds.items():
        object.__setattr__(made, key, rebuilt(one, make, f"{name}.{key}"))
    return made


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
    array = np.array(value) if is_jax(value) else np.ascontiguousarray(value)
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


# --- results --------------------------------------------------------------------------------------
# Outputs of a Program, and the caller's tensors that carry them.
def adopt_results(program: Program, result: Any) -> None:
    """Returned nl.hbm tensors become outputs, except in a grid, where each instance has its own."""
    for value in result if isinstance(result, (tuple, list)) else [result]:
        storage = value.storage if isinstance(value, View) else None
        if storage is None or storage.buffer != "hbm" or storage.role != "local":
            continue
        if storage.frame is not None:
            continue
        warn(
            "sim_private_result",
            f"kernel {program.name} returns {storage.label()}, which is private to a core, "
            "expected one for the caller; make it with buffer=nl.shared_hbm",
            program.place,
        )
        storage.buffer, storage.role = "shared_hbm", "output"


def collect_outputs(program: Program, result: Any) -> None:
    """Outputs are the returned shared_hbm tensors and mutable inputs; nothing else may be.

    Raises:
        NkiError: no result, another result, a part of a tensor, or a mutable parameter that is not
            among the results.
    """
    if not program.returns:
        _collect_written(program)
        return
    values = result if isinstance(result, (tuple, list)) else [result]
    program.result_form = (None,) * len(values) if isinstance(result, (tuple, list)) else None
    if result is None or not values:
        raise refuse(
            "err_tensor_output_not_written_to",
            f"kernel {program.name} returns nothing, expected at least one nl.shared_hbm tensor; "
            "return the output tensors",
            program.place,
        )
    for value in values:
        allowed = isinstance(value, View) and (
            value.storage.buffer == "shared_hbm" or value.storage.mutable
        )
        if not allowed:
            got = value.label() if isinstance(value, View) else type(value).__name__
            raise refuse(
                "err_unsupported_memory",
                f"kernel {program.name} returns {got}, expected tensors made with "
                "buffer=nl.shared_hbm; store the result into one and return that",
                program.place,
            )
        add_output(program, value)
    for storage in program.inputs:
        if storage.mutable and storage not in program.outputs:
            raise refuse(
                "err_mutable_parameter_not_returned",
                f"kernel {program.name} does not return its mutable parameter {storage.label()}, "
                "expected it among the results; return it, or drop the annotation",
                program.place,
            )


def add_output(program: Program, value: View) -> None:
    """Return ``value``, which has to be a whole tensor."""
    if not value.is_full():
        raise refuse(
            "sim_partial_output",
            f"kernel {program.name} returns the part {value.shape} of {value.storage.label()}, "
            "expected whole tensors; return the tensor and slice what the call returns",
            program.place,
        )
    program.outputs.append(value.storage)
    program.output_shapes.append(value.shape)


def _collect_written(program: Program) -> None:
    """Old convention: the outputs are the parameters that the kernel stores into."""
    written = {v.storage for i in program.instructions for v in i.dst}
    program.outputs = [s for s in program.inputs if s in written]
    program.output_shapes = [s.shape for s in program.outputs]
    for storage in program.inputs:
        storage.mutable = storage in written
    if not program.outputs:
        raise refuse(
            "err_tensor_output_not_written_to",
            f"kernel {program.name} stores into none of its parameters, expected at least one: "
            "with kernel_return=False outputs are parameters; store the result into one",
            program.place,
        )


def check_writable(program: Program, tensors: list[Any]) -> None:
    """Refuse to write arrays that the caller made read-only (files that are mapped, say)."""
    for storage, tensor in zip(program.inputs, tensors):
        if storage.mutable and isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
            raise refuse(
                "sim_read_only_input",
                f"kernel {program.name} writes its input {storage.label()}, which the caller made "
                "read-only, expected an array that may be written; pass a copy",
                program.name,
            )


def hand_back(
    program: Program, tensors: list[Any], hosted: list[torch.Tensor], results: list[torch.Tensor]
) -> list[Any]:
    """Results in the caller's types; of a mutable parameter the caller's own tensor, updated."""
    own: dict[int, Any] = {}
    for storage, tensor, host in zip(program.inputs, tensors, hosted):
        if not storage.mutable or is_jax(tensor):  # JAX gets what was written as a result
            continue
        own[storage.id] = tensor
        # A contiguous tensor was written in place; of another one the plan had a copy.
        if isinstance(tensor, torch.Tensor):
            if tensor.data_ptr() != host.data_ptr():
                tensor.detach().copy_(host)
        elif tensor.ctypes.data != host.data_ptr():
            tensor[...] = to_numpy(host, storage.dtype)
    # A mutable parameter comes back as the caller's own object, as on the device.
    made = [
        own[s.id] if s.id in own else from_torch(r, s.dtype, tensors)
        for s, r in zip(program.outputs, results)
    ]
    return [
        m if tuple(m.shape) == shape else m.reshape(shape)
        for m, shape in zip(made, program.output_shapes)
    ]


def returns_value(function: Any) -> bool:
    """False for a function whose source has no ``return value``: outputs are its parameters."""
    tree = source.tree_of(function)
    pending: list[ast.AST] = [] if tree is None else list(tree.body)
    found = tree is None  # no source: the convention of 2.21, which returns
    while pending and not found:
        node = pending.pop()
        found = isinstance(node, ast.Return) and node.value is not None
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):  # their returns are their own
            pending.extend(ast.iter_child_nodes(node))
    return found
