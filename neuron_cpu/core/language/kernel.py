"""Calling kernels: specialise, trace once, verify, then replay on every further call.

The first call of a specialisation runs the Python body and all checks; tracing alone takes about
25 to 50 us an instruction. Every further call flattens its arguments, looks up the Program and
replays a plan on the new data.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import linecache
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import numpy as np
import torch

from ..check import defects, lint, verify
from ..device import release
from ..device.dtypes import Shape
from ..device.errors import (
    NkiError,
    from_users_line,
    refuse,
    strict,
    users_frames,
    users_line,
)  # fmt: skip
from ..device.pause import without_garbage_collection
from ..device.pythons import mended
from ..device.refusals import speaking
from ..device.spec import NeuronCore, using
from ..device.target import DEFAULT_BEFORE, chosen
from ..device.unknown import LAUNCH, UnknownName
from ..program import trace
from ..program.index import is_integer
from ..program.program import Program
from ..program.storage import Frame, Loop, Storage
from ..run.eager import Machine
from ..run.execute import Plan
from ..run.memory import unseen
from . import annotation, gradients, in_jax, specialisation
from .assignment import insert_initial_fills
from .specialisation import (
    TensorKey,
    WrongArguments,
    adopt_results,
    check_writable,
    collect_outputs,
    constant_key,
    hand_back,
    rebuilt,
    shape_of,
    to_torch,
)
from .tensor import Tile

_local = threading.local()


class _Owner:
    """Stands for a running thread: with it go the plans that programs keep for that thread."""


def _out_of_graphs(call: Callable) -> Callable:
    """Dynamo ends its graph before this call, as of torch.compiler.disable, whose import takes a
    second, and traces nothing that it calls. (torch_device.dynamo makes it a node of the graph.)"""
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    with suppress(AttributeError):  # of other PyTorchs
        dynamo: Any = torch._C._dynamo.eval_frame
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(call.__code__, dynamo._FrameExecStrategy(skip, skip))
    return call


@dataclasses.dataclass
class KernelCall:
    """One top-level kernel call, as observers see it.

    Attributes:
        name: kernel function's name.
        program: the specialisation that ran (or was traced, for meta tensors).
        inputs, outputs: the tensors, in the caller's own types; an observer may replace outputs.
        kernel, arguments: what was called, with which positional and keyword arguments.
    """

    name: str
    program: Program
    inputs: list[Any]
    outputs: list[Any]
    kernel: Any = None
    arguments: tuple[tuple, dict] = ((), {})


# Calls kernels whose tensors are on another device or have no values; None: nobody has such.
_caller: Callable[[Kernel, tuple, dict], Any] | None = None


def called_by(caller: Callable[[Kernel, tuple, dict], Any]) -> None:
    """From here on `caller` gets each top-level call: the kernel, its arguments, its keywords.

    It hands on with ``kernel.on_host(...)`` what it finds no tensors of its own in.
    """
    global _caller
    _caller = caller


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


def at_users_line(run: Callable, *args: Any) -> Any:
    """``run(*args)``; the traceback of an error ends at the user's line."""
    __tracebackhide__ = True
    try:
        return run(*args)
    except (NkiError, WrongArguments) as error:
        raise error.with_traceback(users_frames(error)) from error.__cause__
    except RecursionError as error:  # whichever line came too deep
        raise mended(error).with_traceback(users_frames(error)) from None
    except Exception as error:
        made = mended(error).with_traceback(from_users_line(error))
        raise made  # noqa: B904 - its own cause stays


def _observers() -> list[Callable[[KernelCall], None]]:
    if not hasattr(_local, "observers"):
        _local.observers = []
    return _local.observers


def in_a_graph() -> bool:
    """Whether a graph's build or run calls the kernels of this thread."""
    return bool(_observers())


class Kernel:
    """A function under ``nki.jit``: callable with torch tensors or numpy arrays.

    ``kernel[grid](...)`` launches a grid; torch meta tensors are traced and verified only. Inside
    another kernel the function is inlined. With ``kernel_return=False`` (the convention before
    2.21) outputs are parameters: the kernel stores into the caller's tensors and returns nothing.
    Tensors of parameters annotated nt.mutable_tensor are updated in place and returned.
    """

    today = False  # a kernel of `nki`

    def __init__(self, function: Callable, grid: Shape = (), **options: Any) -> None:
        __tracebackhide__ = True  # as in __call__
        if not hasattr(function, "__name__"):  # such as a functools.partial
            raise refuse(
                "sim_no_function",
                f"a kernel is made of a {type(function).__name__}, expected a function; write "
                "@nki.jit above its def, and give all arguments where it is called",
            ).with_traceback(users_line())
        self.function, self.grid, self.options = function, grid, options
        self.programs: dict[Any, Program] = {}
        self.lock = threading.Lock()
        functools.update_wrapper(self, function)

    def __repr__(self) -> str:
        language = "nki" if self.today else "neuronxcc.nki"
        grid = f"[{', '.join(map(str, self.grid))}]" if self.grid else ""
        return f"<{language} kernel {self.name}{grid}{inspect.signature(self.function)}>"

    def __getattr__(self, name: str) -> NoReturn:
        __tracebackhide__ = True  # as in __call__
        if name.startswith("_"):
            raise AttributeError(name)
        use = LAUNCH.get(name, "kernel.trace(arguments), .check or .profile, or a call")
        error = UnknownName(
            "sim_unknown_name", f"a kernel has no .{name}, expected what kernels have; use {use}"
        )
        raise error.with_traceback(users_line())

    @property
    def name(self) -> str:
        return self.function.__name__

    func_name = name  # NxD 0.17 tells kernels from functions by it (operators/topk.py)

    @property
    def func(self) -> Callable:  # the SDK's name for it, which nki-autotune reads
        return self.function

    def __getitem__(self, grid: Any) -> Kernel:
        if trace.active() is not None:
            raise refuse(
                "err_nested_kernel_with_spmd_grid",
                f"kernel {self.name} is launched with a grid inside another kernel, expected a "
                "plain call; loop over its instances instead",
            )
        __tracebackhide__ = True  # as in __call__
        sizes = grid if isinstance(grid, tuple) else (grid,)
        # Programs and their lock are shared: the grid is part of the key, and models launch anew
        # (kernel[grid](...)) on every step.
        given = [getattr(size, "__name__", size) for size in sizes]
        if not all(is_integer(size) and size > 0 for size in sizes):
            raise refuse(
                "sim_launch",
                f"kernel {self.name} is launched with {given}, expected positive integers; "
                "write kernel[8](...) or kernel[2, 4](...): instances have no threads",
            ).with_traceback(users_line())
        launched = Kernel(self.function, tuple(int(g) for g in sizes), **self.options)
        launched.programs, launched.lock = self.programs, self.lock
        return launched

    @_out_of_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if trace.active() is not None:  # called by another kernel: inlined into its program
            return self.function(*args, **kwargs)
        __tracebackhide__ = True  # notebooks and pytest leave this entry out
        if _caller is not None:
            return at_users_line(_caller, self, args, kwargs)
        return at_users_line(self.here, args, kwargs)

    def on_host(self, *args: Any, **kwargs: Any) -> Any:
        """The call with tensors in the host's memory, whoever has the others."""
        return self._called(args, kwargs)

    def here(self, args: tuple, kwargs: dict) -> Any:
        """A call of tensors that no device has."""
        if in_jax.is_traced(args, kwargs):
            return in_jax.call(self, args, kwargs)
        return gradients.told(self.name, (*args, *kwargs.values()), self._called(args, kwargs))

    def _called(self, args: tuple, kwargs: dict) -> Any:
        """A call that is not inlined: the results of the specialisation's Program."""
        tensors, key = self._keyed(args, kwargs)
        meta = [isinstance(t, torch.Tensor) and t.is_meta for t in tensors]
        only_shapes = any(meta)
        if only_shapes and not all(meta) and not _observers():  # a model's graph has constants
            raise refuse(
                "sim_meta_argument",
                f"kernel {self.name} is called with meta tensors beside tensors with values, "
                "expected values in all of them or in none; load the weights before the call",
            )
        eager = os.environ.get("NKI_CPU_EAGER") == "1" or self.options.get("eager")
        if eager and not only_shapes:
            with unseen():
                return self._eager(args, kwargs)
        program = self._specialised(key, args, kwargs)
        if only_shapes:
            outputs = [
                torch.empty(shape, dtype=s.dtype.torch, device="meta")
                for s, shape in zip(program.outputs, program.output_shapes)
            ]
        else:
            with unseen():
                outputs = self._execute(program, tensors)
        self._notify(program, tensors, outputs, (args, kwargs))
        return self._returned(program, outputs)

    def _flatten(self, args: tuple, kwargs: dict) -> tuple[list[Any], Any]:
        """Tensors among the arguments, in order, and a key for everything else."""
        tensors: list[Any] = []

        def note(value: Any, _: str) -> Any:  # a Program serves all data of a shape
            tensors.append(value)
            shape, dt = shape_of(value)
            return TensorKey(f"{shape} {dt.name}")

        # Keywords by name, as _bind makes the program's inputs: the order of tensors is theirs.
        given = [*enumerate(args), *sorted(kwargs.items())]
        return tensors, tuple(
            [(k, constant_key(rebuilt(value, note, everywhere=self.today))) for k, value in given]
        )

    def _bind(
        self, tracer: trace.Tracer, args: tuple, kwargs: dict, machine: Any
    ) -> tuple[list, dict]:
        """Kernel-side views of the tensor arguments; everything else passes through."""

        def make(value: Any, name: str) -> Any:
            shape, dt = shape_of(value)
            # a scalar is one element
            storage = tracer.storage(shape or (1,), dt, "hbm", "input", name)
            self._enter(storage, name, shape)
            tracer.program.inputs.append(storage)
            if machine is not None:
                machine.bind(storage, to_torch(value, writes=True))
            return tracer.whole(storage)

        # Inputs are named as the parameters are, for messages; varargs by their position.
        code = getattr(self.function, "__code__", None)
        names = code.co_varnames if code is not None else ()
        listed = [
            rebuilt(a, make, names[k] if k < len(names) else f"arg{k}", self.today)
            for k, a in enumerate(args)
        ]
        return listed, {k: rebuilt(v, make, k, self.today) for k, v in sorted(kwargs.items())}

    def _enter(self, storage: Storage, name: str, shape: Shape) -> None:
        """An argument's tensor becomes an input: whether the kernel may write it."""
        if 0 in shape:
            raise refuse(
                "sim_shape", f"argument {name} has shape {shape}, expected elements; pass some"
            )
        kind = annotation.parameters(self.function).get(name)
        if kind is not None:
            annotation.check_shape(kind, name, shape, self.name)
            storage.mutable = issubclass(kind, annotation.mutable_tensor)
        # Before 2.21 any parameter may be an output; which are is known after the tracing.
        storage.mutable = storage.mutable or not self.options.get("kernel_return", True)

    def _keyed(self, args: tuple, kwargs: dict) -> tuple[list[Any], Any]:
        """Tensors and key of a call; an error names the argument of an unknown type."""
        try:
            return self._flatten(args, kwargs)
        except TypeError:
            specialisation.name_argument(self.function, self._flatten, args, kwargs)
            raise

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The verified Program for these arguments (only shapes, types and constants count)."""
        return at_users_line(lambda: self._specialised(self._keyed(args, kwargs)[1], args, kwargs))

    def _specialised(self, key: Any, args: tuple, kwargs: dict) -> Program:
        """The Program of the arguments that ``key`` stands for, traced on the first call."""
        # the rules that a program has been verified by are part of what it is
        key = (self.grid, *self._rules(), key)
        found = self.programs.get(key)
        if found is None:
            # Ranks are threads that reach a new shape at the same time: one of them traces, the
            # others wait and look again.
            with self.lock:
                found = self.programs.get(key)
                if found is None:
                    specialisation.check_call(self.function, args, kwargs)
                    with without_garbage_collection():
                        found = self._record(args, kwargs)
                        self._check(found)
                    self.programs[key] = found
        return found

    def _rules(self) -> tuple:
        """The settings that, beside the arguments, decide which program a call gets."""
        return (self._core().name, release.chosen(), strict())

    def _core(self) -> NeuronCore:
        """The generation that the kernel is built for: the environment's or the kernel's own."""
        return chosen(self.options.get("platform_target") or DEFAULT_BEFORE)

    def _check(self, program: Program) -> None:
        """Check the whole Program, and its source.

        Findings in the source explain errors of the Program, so they come first. In strict mode
        they are errors themselves, and a documented error goes before them.
        """
        checks: list[Callable[[], None]] = [
            lambda: lint.lint(program.function),
            lambda: defects.lint(program.function),
            lambda: verify.verify(program),
        ]
        with using(program.core), speaking(False):
            for check in reversed(checks) if strict() else checks:
                check()

    def _returned(self, program: Program, outputs: list[Any]) -> Any:
        """The result of a call: the outputs, nested as the kernel returned them."""
        rest = iter(outputs)

        def fill(form: Any) -> Any:
            return next(rest, None) if form is None else tuple(map(fill, form))

        return fill(program.result_form) if program.returns else None

    def _record(self, args: tuple, kwargs: dict, machine: Any = None) -> Program:
        """Run the function once for every grid instance, recording."""
        with using(self._core()):
            return self._recorded(args, kwargs, machine)

    def _recorded(self, args: tuple, kwargs: dict, machine: Any) -> Program:
        program = Program(self.name, self.grid, self.function)
        program.today = self.today
        program.returns = self.options.get("kernel_return", True)
        code = getattr(self.function, "__code__", None)
        linecache.checkcache(getattr(code, "co_filename", ""))  # notebooks reload modules
        with trace.Tracer(program, code, machine, Tile) as tracer:
            bound_args, bound_kwargs = self._bind(tracer, args, kwargs, machine)
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
            adopt_results(program, result)
            # Only now is it known which zeros of PSUM tiles anybody reads.
            insert_initial_fills(program)
            tracer.finish()
        collect_outputs(program, result)
        return program

    def _execute(self, program: Program, tensors: list[Any]) -> list[Any]:
        # A plan owns the buffers that it computes in, so each thread (rank) has its own.
        check_writable(program, tensors)
        owner = getattr(_local, "owner", None)
        if owner is None:
            owner = _local.owner = _Owner()
        plan = program.plans.get(owner)
        if plan is None:
            with without_garbage_collection():
                plan = program.plans[owner] = Plan(program)
        hosted = [to_torch(t) for t in tensors]
        return hand_back(program, tensors, hosted, plan.run(hosted))

    def _eager(self, args: tuple, kwargs: dict) -> Any:
        machine = Machine()
        program = self._record(args, kwargs, machine)
        self._check(program)
        tensors, _ = self._flatten(args, kwargs)
        check_writable(program, tensors)
        raw = [machine.memory(s) for s in program.outputs]
        outputs = hand_back(program, tensors, [machine.memory(s) for s in program.inputs], raw)
        self._notify(program, tensors, outputs, (args, kwargs))
        return self._returned(program, outputs)

    def _notify(
        self, program: Program, inputs: list[Any], outputs: list[Any], arguments: tuple[tuple, dict]
    ) -> None:
        for callback in list(_observers()):
            callback(KernelCall(self.name, program, inputs, outputs, self, arguments))

    def __reduce__(self) -> tuple:
        """Pickle it by its function's name, as functions are: saved graphs hold kernels."""
        function = self.function
        if "<" in function.__qualname__:
            raise pickle.PicklingError(f"kernel {function.__qualname__} is made inside a function")
        place = function.__module__, function.__qualname__
        return _named, (type(self), *place, self.grid, self.options)


def _named(kind: type, module: str, name: str, grid: Shape, options: dict) -> Any:
    """The kernel of the function that a module has under `name`, decorated or not."""
    found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    made = kind(getattr(found, "function", found), grid, **options)
    if isinstance(found, Kernel) and found.options == options:  # programs that are traced already
        made.programs, made.lock = found.programs, found.lock
    return made
