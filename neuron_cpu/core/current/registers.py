"""Registers: 32-bit scalars of an engine's sequencer, known when the kernel runs.

A register that constants made has a value here, too. One that was loaded has it in eager mode only;
elsewhere it is a hidden (1, 1) tile, which serves as a run-time offset. A kernel whose loops or
conditions depend on such a register is executed while it is recorded (``NeedsValues``).
"""

from typing import Any, NoReturn

from ..device.dtypes import INT32
from ..device.errors import NkiError, current_place, refuse
from ..instructions.arguments import whole
from ..instructions.copies import MEMSET, TENSOR_COPY, FillAttrs, copy_attrs
from ..instructions.dma import DMA_COPY
from ..instructions.recorder import record
from ..program import trace
from ..program.index import is_integer
from ..program.view import View
from .releases import isa


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
            "a VirtualRegister has no value while the kernel is built, expected registers as "
            "bounds of nl.fori_loop, offsets of .ap and in nl.ds; compute in SBUF and load again"
        )

    __int__ = __index__ = __float__ = __add__ = __radd__ = __sub__ = __rsub__ = _no_number
    __mul__ = __rmul__ = __lt__ = __le__ = __gt__ = __ge__ = _no_number


def _hidden() -> View:
    tracer = trace.current("a register")
    return tracer.whole(tracer.storage((1, 1), INT32, "sbuf", name="register"))


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


@isa(None)
def register_alloc(x: Any = None) -> VirtualRegister:
    """A new register: of an int, uninitialised, or loaded from a tensor of one element."""
    trace.current("nisa.register_alloc")
    made = VirtualRegister(0 if x is None else x if is_integer(x) else None)
    if isinstance(x, View):
        register_load(made, x)
    return made


@isa(None, former={"imm": "src"})
def register_move(dst: VirtualRegister, src: Any) -> None:
    """``dst`` becomes the constant or the other register's value."""
    _writable(dst, "register_move")
    if isinstance(src, VirtualRegister):
        dst.static, dst._tile = src.static, src._tile if src.static is None else None
        dst.loaded = src.loaded
    else:
        dst.static, dst._tile, dst.loaded = whole(src, "register_move src"), None, False


@isa(None)
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


@isa(None)
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
        raise refuse("sim_register_operand", f"{what} of {got}, expected a tensor of one element")
