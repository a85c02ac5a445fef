"""Calling kernels: specialise, trace once, verify, then replay on every further call.

What a call costs: the first one of a specialisation runs the Python body and all checks (about 25
to 50 us an instruction for tracing alone), every further one flattens its arguments, looks up the
Program and replays a plan on the new data.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..check import lint, verify
from ..device import dtypes
from ..device.errors import refuse, warn
from ..device.pause import without_garbage_collection
from ..instructions.assignment import insert_zero_fills
from ..program import trace
from ..program.program import Program
from ..program.storage import Frame, Loop
from ..program.view import View
from ..run.eager import Machine
from ..run.execute import Plan
from . import annotation
from .tensor import Tensor

_local = threading.local()


@dataclasses.dataclass
class KernelCall:
    """One top-level kernel call, as observers see it.

    Attributes:
        name: kernel function's name.
        program: the specialisation that ran (or was traced, for meta tensors).
        inputs, outputs: the tensors, in the caller's own types.
    """

    name: str
    program: Program
    inputs: list[Any]
    outputs: list[Any]


def release_thread() -> None:
    """Drop the plans that the running thread keeps between kernel calls.

    A thread that ends calls this first: tensors that are freed together with the thread itself may
    be freed while the interpreter shuts down, which aborts the process.
    """
    _local.__dict__.clear()


@contextmanager
def observe_kernel_calls(callback: Callable[[KernelCall], None]) -> Iterator[None]:
    """Call ``callback`` after every top-level kernel call of this thread inside the block."""
    observers = _observers()
    observers.append(callback)
    try:
        yield
    finally:
        observers.remove(callback)


def _observers() -> list[Callable[[KernelCall], None]]:
    if not hasattr(_local, "observers"):
        _local.observers = []
    return _local.observers


def is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _shape_of(value: Any) -> tuple[tuple[int, ...], dtypes.DType]:
    return tuple(value.shape), dtypes.to_dtype(value.dtype)


def _constant_key(value: Any) -> Any:
    """Something hashable that stands for a compile-time constant.

    Equal keys must mean equal kernels, so types are part of it: 1, 1.0 and True are equal in Python
    and trace to different instructions.
    """
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_constant_key(v) for v in value))
    if isinstance(value, dict):
        return tuple((k, _constant_key(v)) for k, v in sorted(value.items()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return (type(value), _constant_key(fields))
    try:
        hash(value)
    except TypeError:  # it may change between calls: the same object counts as the same constant
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


def flatten(args: tuple, kwargs: dict) -> tuple[list[Any], Any]:
    """Tensors among the arguments, in order, and a key for everything else."""
    tensors: list[Any] = []
    key: list[Any] = []

    def visit(value: Any) -> Any:
        if is_tensor(value):  # data are no part of the key: a Program serves all data of a shape
            tensors.append(value)
            return ("tensor", *_shape_of(value))
        if isinstance(value, (list, tuple)) and any(is_tensor(v) for v in value):
            return tuple(visit(v) for v in value)
        return _constant_key(value)

    # Keywords by name, as _bind makes the program's inputs: the order of tensors is theirs.
    key.extend(visit(a) for a in args)
    key.extend((k, visit(v)) for k, v in sorted(kwargs.items()))
    return tensors, tuple(key)


def to_torch(value: Any) -> torch.Tensor:
    """A contiguous torch tensor over the same memory where types allow."""
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous()
    array = np.ascontiguousarray(value)
    dt = dtypes.to_dtype(array.dtype)
    # torch does not know the types of ml_dtypes: their bits pass as integers of the same size.
    if dt is dtypes.BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if dt in (dtypes.FLOAT8_E4M3, dtypes.FLOAT8_E5M2):
        return torch.from_numpy(array.view(np.uint8)).view(dt.torch)
    return torch.from_numpy(array)


def to_numpy(value: torch.Tensor, dt: dtypes.DType) -> np.ndarray:
    """A numpy array over the tensor's memory, in the ml_dtypes type where there is one."""
    if dt is dtypes.BFLOAT16:
        return value.view(torch.int16).numpy().view(dt.numpy)
    if dt in (dtypes.FLOAT8_E4M3, dtypes.FLOAT8_E5M2):
        return value.view(torch.uint8).numpy().view(dt.numpy)
    return value.numpy()


class Kernel:
    """What ``nki.jit`` makes of a function: callable with torch tensors or numpy arrays.

    ``kernel[grid](...)`` launches a grid; torch meta tensors are traced and verified only. Inside
    another kernel the function is inlined. With ``kernel_return=False`` (the convention before
    2.21) outputs are parameters: the kernel stores into the caller's tensors and returns nothing.
    Tensors of parameters annotated nt.mutable_tensor are updated in place and returned.
    """

    def __init__(self, function: Callable, grid: tuple[int, ...] = (), **options: Any) -> None:
        self.function, self.grid, self.options = function, grid, options
        self.programs: dict[Any, Program] = {}
        self.lock = threading.Lock()
        functools.update_wrapper(self, function)

    @property
    def name(self) -> str:
        return self.function.__name__

    def __getitem__(self, grid: Any) -> Kernel:
        if trace.active() is not None:
            raise refuse(
                "err_nested_kernel_with_spmd_grid",
                f"kernel {self.name} is launched with a grid inside another kernel, expected a "
                "plain call; loop over its instances instead",
            )
        sizes = grid if isinstance(grid, tuple) else (grid,)
        # Programs and their lock are shared: the grid is part of the key, and models launch anew
        # (kernel[grid](...)) on every step.
        launched = Kernel(self.function, tuple(int(g) for g in sizes), **self.options)
        launched.programs, launched.lock = self.programs, self.lock
        return launched

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if trace.active() is not None:  # called by another kernel: inlined into its program
            return self.function(*args, **kwargs)
        tensors, _ = flatten(args, kwargs)
        only_shapes = any(isinstance(t, torch.Tensor) and t.is_meta for t in tensors)
        eager = os.environ.get("NKI_CPU_EAGER") == "1" or self.options.get("eager")
        if eager and not only_shapes:
            return self._eager(args, kwargs)
        program = self.trace(*args, **kwargs)
        if only_shapes:
            outputs = [
                torch.empty(shape, dtype=s.dtype.torch, device="meta")
                for s, shape in zip(program.outputs, program.output_shapes)
            ]
        else:
            outputs = self._execute(program, tensors)
        self._notify(program, tensors, outputs)
        return _returned(program, outputs)

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The verified Program for these arguments (only shapes, types and constants count)."""
        _, key = flatten(args, kwargs)
        key = (self.grid, key)
        found = self.programs.get(key)
        if found is None:
            # Ranks are threads that reach a new shape at the same time: one of them traces, the
            # others wait and look again.
            with self.lock:
                found = self.programs.get(key)
                if found is None:
                    with without_garbage_collection():
                        found = self._record(args, kwargs)
                        lint.lint(found.function)
                        verify.verify(found)
                    self.programs[key] = found
        return found

    def _record(self, args: tuple, kwargs: dict, machine: Any = None) -> Program:
        """Run the function once for every grid instance, recording."""
        program = Program(self.name, self.grid, self.function)
        program.returns = self.options.get("kernel_return", True)
        code = getattr(self.function, "__code__", None)
        with trace.Tracer(program, code, machine, Tensor) as tracer:
            bound_args, bound_kwargs = _bind(tracer, args, kwargs, machine)
            result: Any = None
            # The launch grid is the outermost loop: one instance is recorded after the other, and
            # the race check finds what instances may not share.
            total = int(np.prod(self.grid, dtype=int))
            loop = Loop(-1, "grid", total, None)
            with annotation.checked_locals(self.function, self.name):
                for position in range(total):
                    if self.grid:
                        at = np.unravel_index(position, self.grid)
                        tracer.grid_index = tuple(int(i) for i in at)
                    tracer.frame = Frame(loop, position, None) if total > 1 else None
                    tracer.begin_instance()
                    result = self.function(*bound_args, **bound_kwargs)
            tracer.frame = None
            _adopt_results(program, result)
            # Only now is it known which zeros of PSUM tiles anybody reads.
            insert_zero_fills(program)
            tracer.finish()
        _collect_outputs(program, result)
        return program

    def _execute(self, program: Program, tensors: list[Any]) -> list[Any]:
        # A plan owns the buffers that it computes in, so each thread (rank) has its own.
        plans = getattr(_local, "plans", None)
        if plans is None:
            plans = _local.plans = {}
        plan = plans.get(id(program))
        if plan is None:
            plan = plans[id(program)] = Plan(program)
        hosted = [to_torch(t) for t in tensors]
        results = plan.run(hosted)
        return _hand_back(program, tensors, hosted, results)

    def _eager(self, args: tuple, kwargs: dict) -> Any:
        machine = Machine()
        program = self._record(args, kwargs, machine)
        verify.verify(program)
        raw = [machine.memory(s) for s in program.outputs]
        tensors, _ = flatten(args, kwargs)
        hosted = [machine.memory(s) for s in program.inputs]
        outputs = _hand_back(program, tensors, hosted, raw)
        self._notify(program, tensors, outputs)
        return _returned(program, outputs)

    def _notify(self, program: Program, inputs: list[Any], outputs: list[Any]) -> None:
        for callback in list(_observers()):
            callback(KernelCall(self.name, program, inputs, outputs))


def _hand_back(
    program: Program, tensors: list[Any], hosted: list[torch.Tensor], results: list[torch.Tensor]
) -> list[Any]:
    """Results in the caller's types; of a mutable parameter the caller's own tensor, updated."""
    as_torch = any(isinstance(t, torch.Tensor) for t in tensors)
    own = {}
    for storage, tensor, host in zip(program.inputs, tensors, hosted):
        if not storage.mutable:
            continue
        own[storage.id] = tensor
        # A contiguous tensor was written in place; of another one the plan had a copy.
        if isinstance(tensor, torch.Tensor):
            if tensor.data_ptr() != host.data_ptr():
                tensor.detach().copy_(host)
        elif tensor.ctypes.data != host.data_ptr():
            tensor[...] = to_numpy(host, storage.dtype)
    made = [
        own[s.id] if s.id in own else r if as_torch else to_numpy(r, s.dtype)
        for s, r in zip(program.outputs, results)
    ]
    return [
        m if tuple(m.shape) == shape else m.reshape(shape)
        for m, shape in zip(made, program.output_shapes)
    ]


def returns_value(function: Any) -> bool:
    """False for a function whose source has no ``return value``: outputs are its parameters."""
    tree = lint.tree_of(function)
    pending: list[ast.AST] = [] if tree is None else list(tree.body)
    found = tree is None  # no source: the convention of 2.21, which returns
    while pending and not found:
        node = pending.pop()
        found = isinstance(node, ast.Return) and node.value is not None
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):  # their returns are their own
            pending.extend(ast.iter_child_nodes(node))
    return found


def _returned(program: Program, outputs: list[Any]) -> Any:
    if not program.returns:
        return None
    if program.return_tuple:
        return tuple(outputs)
    return outputs[0] if outputs else None


def _bind(tracer: trace.Tracer, args: tuple, kwargs: dict, machine: Any) -> tuple[list, dict]:
    """Kernel-side views of the tensor arguments; everything else passes through."""
    types = annotation.parameters(tracer.program.function)

    def make(value: Any, name: str) -> Any:
        if is_tensor(value):
            shape, dt = _shape_of(value)
            storage = tracer.storage(
                shape or (1,), dt, "hbm", "input", name
            )  # a scalar: one element
            kind = types.get(name)
            if kind is not None:
                annotation.check_shape(kind, name, shape, tracer.program.name)
                storage.mutable = issubclass(kind, annotation.mutable_tensor)
            # Before 2.21 any parameter may be an output; which are is known after the tracing.
            storage.mutable = storage.mutable or not tracer.program.returns
            tracer.program.inputs.append(storage)
            if machine is not None:
                machine.bind(storage, to_torch(value))
            return tracer.whole(storage)
        if isinstance(value, (list, tuple)) and any(is_tensor(v) for v in value):
            return type(value)(make(v, f"{name}[{k}]") for k, v in enumerate(value))
        return value

    # Inputs are named as the parameters are, for messages; varargs by their position.
    code = getattr(tracer.program.function, "__code__", None)
    names = code.co_varnames if code is not None else ()
    bound = [make(a, names[k] if k < len(names) else f"arg{k}") for k, a in enumerate(args)]
    return bound, {k: make(v, k) for k, v in sorted(kwargs.items())}


def _adopt_results(program: Program, result: Any) -> None:
    """Returned nl.hbm tensors become outputs; not those of a grid, where each instance has one."""
    for value in result if isinstance(result, (tuple, list)) else [result]:
        storage = value.storage if isinstance(value, View) else None
        if storage is None or storage.buffer != "hbm" or storage.role != "local":
            continue
        if storage.frame is not None:
            continue
        warn(
            "sim_private_result",
            f"kernel {program.name} returns {storage.label()}, which is private to a core, "
            "expected a tensor made with buffer=nl.shared_hbm; change nl.hbm to nl.shared_hbm",
            program.name,
        )
        storage.buffer, storage.role = "shared_hbm", "output"


def _collect_outputs(program: Program, result: Any) -> None:
    """Outputs are the returned shared_hbm tensors and mutable inputs; nothing else may be."""
    if not program.returns:
        _collect_written(program)
        return
    values = result if isinstance(result, (tuple, list)) else [result]
    program.return_tuple = isinstance(result, (tuple, list))
    if result is None or not values:
        raise refuse(
            "err_tensor_output_not_written_to",
            f"kernel {program.name} returns nothing, expected at least one nl.shared_hbm tensor; "
            "return the output tensors",
            program.name,
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
                program.name,
            )
        if not value.is_full():
            raise refuse(
                "sim_partial_output",
                f"kernel {program.name} returns the part {value.shape} of {value.storage.label()}, "
                "expected whole tensors; return the tensor and slice what the call returns",
                program.name,
            )
        program.outputs.append(value.storage)
        program.output_shapes.append(value.shape)
    for storage in program.inputs:
        if storage.mutable and storage not in program.outputs:
            raise refuse(
                "err_mutable_parameter_not_returned",
                f"kernel {program.name} does not return its mutable parameter {storage.label()}, "
                "expected it among the results; return it, or drop the annotation",
                program.name,
            )


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
            program.name,
        )
