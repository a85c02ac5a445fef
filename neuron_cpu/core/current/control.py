"""Registers of ``nki.isa``; loops, launch and ordering of ``nki.language``.

The ranges are Python's own: a kernel is a metaprogram whose loops unroll. Device loops unroll here,
too, with a register whose value is known; where their bounds are data the kernel is executed while
it is recorded.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

from ..device.dtypes import INT32
from ..device.errors import NkiError, current_place, refuse, type_name, warn
from ..device.release import nki_since
from ..device.spec import CORE
from ..instructions.arguments import whole
from ..instructions.copies import DMA_COPY, MEMSET, TENSOR_COPY, FillAttrs, copy_attrs
from ..instructions.recorder import record
from ..program import trace
from ..program.index import is_integer
from ..program.view import View
from .operands import isa


# --- registers ------------------------------------------------------------------------------------
# 32-bit scalars of an engine's sequencer, known when the kernel runs. A register that constants
# made has a value here, too. One that was loaded has it in eager mode only; elsewhere it is a
# hidden (1, 1) tile, which serves as a run-time offset. A kernel whose loops or conditions depend
# on such a register is executed while it is recorded (``NeedsValues``).
class NeedsValues(NkiError):
    """The kernel's control flow depends on data, so tracing alone cannot follow it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            "sim_needs_values",
            f"{what} depends on data, expected arguments with values; call the kernel with tensors "
            "instead of shapes",
            current_place(),
        )


class VirtualRegister:
    """A register of the running kernel.

    Attributes:
        static: its value where constants made it (or the kernel is executed while recorded).
        frozen: a loop's index, which the kernel may only read.
        loaded: the value was read from a tensor, of a kernel that is executed while recorded.
    """

    __slots__ = ("_tile", "frozen", "loaded", "static")

    def __init__(self, state: Any = None, frozen: bool = False) -> None:
        self.static: int | None = None if state is None else whole(state, "register")
        self._tile: View | None = None
        self.frozen = frozen
        self.loaded = False

    @property
    def tile(self) -> View:
        """The (1, 1) tile that holds the value."""
        if self._tile is None:
            self._tile = _hidden()
            record(MEMSET, (self._tile,), (), FillAttrs(value=self.static or 0))
        return self._tile

    def value(self, what: str) -> int:
        """The value, for control flow.

        Raises:
            NeedsValues: it is known when the kernel runs only.
        """
        if self.static is None:
            raise NeedsValues(what)
        if self.loaded:
            trace.current(what).program.for_values = True
        return self.static

    def __bool__(self) -> bool:
        return self.value("a condition on a register") != 0

    def _no_number(self, *_: Any) -> NoReturn:
        raise TypeError(
            "a VirtualRegister has no value while the kernel is built, expected one as a loop's "
            "bound, in nl.ds or as scalar_offset= of .ap"
        )

    __int__ = __index__ = __float__ = __add__ = __radd__ = __sub__ = __rsub__ = _no_number
    __mul__ = __rmul__ = __lt__ = __le__ = __gt__ = __ge__ = _no_number


def _hidden() -> View:
    tracer = trace.current("a register")
    return tracer.whole(tracer.storage((1, 1), INT32, "sbuf"))


def _register(given: Any, what: str) -> None:
    if not isinstance(given, VirtualRegister):
        raise refuse(
            "sim_register_operand",
            f"{what} got {type(given).__name__}, expected a register; make one with register_alloc",
        )


def _writable(register: VirtualRegister, what: str) -> None:
    _register(register, what)
    if register.frozen:
        raise AssertionError("the index of a device loop is read-only; copy it with register_move")


@isa(None, named=False)
def register_alloc(x: Any = None) -> VirtualRegister:
    """A new register: of an int, uninitialised, or loaded from a tensor of one element."""
    trace.current("nisa.register_alloc")
    made = VirtualRegister(0 if x is None else x if is_integer(x) else None)
    if isinstance(x, View):
        register_load(made, x)
    return made


@isa(None, former={"imm": "src"}, named=False)
def register_move(dst: VirtualRegister, src: Any) -> None:
    """``dst`` becomes the constant or the other register's value."""
    _writable(dst, "register_move")
    if isinstance(src, VirtualRegister):
        dst.static, dst._tile = src.static, src._tile if src.static is None else None
        dst.loaded = src.loaded
    else:
        dst.static, dst._tile, dst.loaded = whole(src, "register_move src"), None, False


@isa(None, named=False)
def register_load(dst: VirtualRegister, src: View) -> None:
    """``dst`` becomes the one element of ``src`` (SBUF or HBM)."""
    _writable(dst, "register_load")
    _one_element(src, "register_load")
    tracer = trace.current("nisa.register_load")
    tile = _hidden()
    column = src if src.ndim == 2 else src.reshape((1, 1))
    op = TENSOR_COPY if src.on_chip else DMA_COPY
    record(op, (tile,), (column,), copy_attrs(tile.dt, src.dt))
    dst._tile, dst.static = tile, None
    if tracer.machine is not None:
        dst.static = int(tracer.machine.values(tile).reshape(-1)[0])
        dst.loaded = True


@isa(None, named=False)
def register_store(dst: View, src: VirtualRegister) -> None:
    """The one element of ``dst`` (SBUF or HBM) becomes the register's value."""
    _one_element(dst, "register_store")
    _register(src, "register_store")
    if src.static is not None:
        src._tile = None  # the constant may have changed since
    column = dst if dst.ndim == 2 else dst.reshape((1, 1))
    tile = src.tile
    op = TENSOR_COPY if dst.on_chip else DMA_COPY
    record(op, (column,), (tile,), copy_attrs(dst.dt, tile.dt))


def _one_element(tensor: Any, what: str) -> None:
    if not isinstance(tensor, View) or tensor.size != 1:
        got = tensor.label() if isinstance(tensor, View) else type(tensor).__name__
        raise refuse(
            "sim_register_operand",
            f"{what} of {got}, expected a tensor of one element; slice one, tile[0:1, 0:1]",
        )


LIMIT = 1 << 20  # iterations of one device loop: a condition that never fails ends here


# --- loops ----------------------------------------------------------------------------------------
def _unrolled(what: str, start: int, stop: int | None, step: int) -> range:
    given = (start,) if stop is None else (start, stop, step)
    for bound in given:
        if not is_integer(bound):
            raise refuse(
                "sim_loop_bound",
                f"nl.{what} of a {type_name(bound)}, expected integers known while building; "
                "divide sizes with //, take one number of a shape, and loop over what only data "
                "tell with nl.dynamic_range",
            )
    return range(*given)


def affine_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Python's ``range``; the three names mean the same since SDK 2.27."""
    return _unrolled("affine_range", start, stop, step)


def sequential_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Python's ``range``."""
    return _unrolled("sequential_range", start, stop, step)


def static_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Python's ``range``."""
    return _unrolled("static_range", start, stop, step)


def _bound(value: Any, what: str) -> int:
    if isinstance(value, VirtualRegister):
        return value.value(f"bound of {what}")
    if is_integer(value):
        return int(value)
    raise refuse(
        "sim_loop_bound",
        f"{what} with a bound of type {type_name(value)}, expected an int or a register; load the "
        "number with nisa.register_load",
    )


def _check_order(what: str) -> None:
    """The instructions of a device loop cannot be put in one order with those around it."""
    if trace.current(f"nl.{what}").in_order:
        raise refuse(
            "sim_ordered_loop",
            f"nl.{what} inside nl.no_reorder(), expected unrolled code there; use Python's range, "
            "or put no_reorder() inside the loop's body",
        )


LOGICAL_CORE = "NEURON_LOGICAL_NC_CONFIG"  # of the SDK: physical cores that a logical one has


def _warn_of_nesting(what: str) -> None:
    """One device loop inside another, and one on a single core of a logical core of two."""
    tracer = trace.current(f"nl.{what}")
    frame = tracer.frame
    nested = frame is not None and any(f.loop.kind == "sequential" for f in frame.path())
    if nested and (CORE.number == 2 or not nki_since("2.32")):
        warn(
            "sim_nested_device_loops",
            f"nl.{what} inside another device loop, expected one loop; unroll the inner one with "
            "Python's range",
        )
    alone = tracer.program.cores == 1 and os.environ.get(LOGICAL_CORE, "2") != "1"
    if alone and CORE.number > 2:
        warn(
            "sim_loop_on_one_core",
            f"nl.{what} in a kernel on one of the two cores of a logical core of {CORE.name}, "
            f"expected both; launch it with kernel[2] and give each nl.program_id(0) its part, or "
            f"set {LOGICAL_CORE}=1",
        )


def _indices(lower: Any, upper: Any, step: Any, what: str) -> Iterator[VirtualRegister]:
    """The index register of every iteration of a device loop."""
    if not is_integer(step) or step < 1:
        raise refuse(
            "sim_loop_bound",
            f"step of {what} is {step!r}, expected a positive int; the body takes the index "
            "alone, so keep in tiles what iterations share",
        )
    _check_order(what)
    _warn_of_nesting(what)
    indices = range(_bound(lower, what), _bound(upper, what), int(step))
    for value in trace.current(f"nl.{what}").loop("sequential", indices):
        yield VirtualRegister(value, frozen=True)


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """A device loop; its index is a register that the body may only read."""
    lower, upper = (0, start) if stop is None else (start, stop)
    yield from _indices(lower, upper, step, "dynamic_range")


def fori_loop(lower: Any, upper: Any, body_fun: Callable, step: int = 1) -> None:
    """A device loop: ``body_fun(index register)`` for every index; it returns nothing."""
    for index in _indices(lower, upper, step, "fori_loop"):
        if body_fun(index) is not None:
            raise refuse(
                "sim_loop_body",
                "the body of nl.fori_loop returns a value, expected none: state crosses "
                "iterations in SBUF or HBM; write it there with nisa.tensor_copy or nisa.dma_copy",
            )


def while_loop(init: Any, body_fun: Callable) -> None:
    """A device loop: while the condition register is nonzero, it becomes ``body_fun(it)``."""
    _check_order("while_loop")
    _warn_of_nesting("while_loop")
    condition = init if isinstance(init, VirtualRegister) else VirtualRegister(init)
    for _ in trace.current("nl.while_loop").loop("sequential", range(LIMIT)):
        if not condition.value("condition of nl.while_loop"):
            return
        condition = body_fun(condition)
        if not isinstance(condition, VirtualRegister):
            raise refuse(
                "sim_loop_body",
                f"the body of nl.while_loop returns {type(condition).__name__}, expected the "
                "register of the next condition; return what nisa.register_alloc gave",
            )
    raise refuse(
        "sim_endless_loop",
        f"nl.while_loop has run {LIMIT} iterations, expected a condition that becomes zero; "
        "load a zero into its register in the body, with nisa.register_load",
    )


# --- order ----------------------------------------------------------------------------------------
@contextmanager
def no_reorder() -> Iterator[None]:
    """Every pair of consecutive instructions that are recorded inside is ordered."""
    tracer = trace.current("nl.no_reorder")
    program = tracer.program
    first = len(program.instructions)
    tracer.in_order += 1
    try:
        yield
    finally:
        tracer.in_order -= 1
    core = tracer.grid_index
    own = [i for i in program.instructions[first:] if not core or i.core in (core[0], None)]
    program.edges += pairwise(own)


# --- launch ---------------------------------------------------------------------------------------
def program_id(axis: int = 0) -> int:
    """Number of the core that runs the program, 0 or 1."""
    _check_axis(axis, "program_id")
    tracer = trace.current("nl.program_id")
    tracer.program.copies, index = False, tracer.grid_index
    return index[0] if index else 0


def num_programs(axes: Any = 0) -> int:
    """Cores that run the kernel."""
    for axis in () if axes is None else axes if isinstance(axes, (tuple, list)) else (axes,):
        _check_axis(axis, "num_programs")
    grid = trace.current("nl.num_programs").program.grid
    return grid[0] if grid else 1


def program_ndim() -> int:
    """1 where the kernel was launched with a subscript, else 0."""
    return len(trace.current("nl.program_ndim").program.grid)


def _check_axis(axis: Any, what: str) -> None:
    if whole(axis, f"{what} axis") != 0:
        raise refuse(
            "sim_program_axis",
            f"{what}({axis}), expected axis 0: a launch has one axis only; call nl.{what}(0)",
        )


# --- looking at values ----------------------------------------------------------------------------
def device_print(print_prefix: str, tensor: Any) -> None:
    """Print a tensor while the kernel runs; here in eager mode, elsewhere nothing."""
    tracer = trace.current("nl.device_print")
    if isinstance(tensor, View) and tracer.machine is not None:
        print(print_prefix, tracer.machine.values(tensor))
