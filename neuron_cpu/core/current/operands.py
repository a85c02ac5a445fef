"""Operands and arguments of ``nki.isa`` functions that several of them share.

No broadcasting: operands agree in partitions and in elements per partition (the compiler's verifier
compares just these, nki/migration/index.rst); their shapes may differ, because an instruction walks
patterns.
"""

from __future__ import annotations

import functools
import itertools
from enum import Enum
from typing import Any

from ..device.dtypes import Shape
from ..device.errors import NkiError, refuse, say, type_name, warn
from ..device.spec import Engine, in_force
from ..device.target import chosen, needs
from ..device.unknown import Listed, answer
from ..instructions.alu import ACTIVATIONS, ARITHMETIC, BITWISE, LATER, OPERATORS
from ..instructions.arguments import (  # noqa: F401 - as they are
    check_operator,
    common_part,
    dge_mode,
    nc_version,
    no_tensor,
    oob_mode,
    spread,
)
from ..instructions.entry import OpSpec, blocks_first, form
from ..instructions.vector import Step
from ..instructions.vector import step as any_step
from ..language.operands import FUNCTIONS
from ..program import trace
from ..program.attributes import Attrs
from ..program.program import Instruction
from ..program.view import View, called
from .types import Name

isa = functools.partial(form, "nki.isa", named=True)


# --- enumerations (aws-neuron-sdk v2.32.0, nki/api/nki/isa/__init__.py) ---------------------------
class engine(Enum, metaclass=Listed):
    """Engines of a core; ``unknown`` leaves the choice to the compiler."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


tensor_engine, vector_engine = engine.tensor, engine.vector
scalar_engine, gpsimd_engine = engine.scalar, engine.gpsimd
unknown_engine = engine.unknown


class reduce_cmd(Enum, metaclass=Listed):
    """An instruction's use of its engine's accumulators."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class matmul_perf_mode(Enum, metaclass=Listed):
    """Faster modes of TensorE."""

    none = "none"
    double_row = "double_row"


class dma_engine(Enum, metaclass=Listed):
    """Which DMA an exchange between cores uses."""

    dma = 1
    gpsimd_dma = 2


@isa(None, named=False)
def get_nc_version() -> nc_version:
    """The generation that the kernel is built for."""
    core = in_force() if trace.active() is not None else chosen()
    return nc_version(core.number)


@isa(None, came="2.31", named=False)
def get_nc_sub_version() -> int:
    """Revision of the silicon: 0, the documented default."""
    return 0


def choose(given: Any, what: str, allowed: tuple[Engine, ...]) -> Engine | None:
    """The engine of an ``engine=`` argument, None where it leaves the choice open."""
    if given is engine.unknown:
        return None
    if not isinstance(given, engine):
        raise refuse(
            "sim_engine",
            f"{what} with engine={type(given).__name__}, expected a member of nisa.engine; "
            + (
                "leave it out: the type is that of dst"
                if isinstance(given, Name)
                else f"write engine=nisa.engine.{given if isinstance(given, str) else 'vector'}"
            ),
        )
    found = Engine.__members__.get(given.name.upper())
    if found not in allowed:
        names = " or ".join(f"nisa.engine.{e.value[:-1].lower()}" for e in allowed)
        raise refuse("sim_engine", f"{what} cannot run on {given}, expected {names}; drop engine=")
    return found


# --- operands -------------------------------------------------------------------------------------
class NkiInstruction:
    """Handle of a recorded instruction, for ordering."""

    __slots__ = ("_made",)

    def __init__(self, made: Instruction) -> None:
        self._made = made

    def depends_on(self, *producers: NkiInstruction) -> NkiInstruction:
        """Run after ``producers``, whatever the data say; returns the handle."""
        edges = trace.current("NkiInstruction.depends_on").program.edges
        edges += [(producer._made, self._made) for producer in producers]
        return self


def put(op: OpSpec, dst: tuple[View, ...], src: tuple[View, ...], attrs: Attrs) -> NkiInstruction:
    """Record ``op`` from ``src`` into ``dst``."""
    tracer = trace.active() or trace.current(f"nisa.{op.name}")
    return NkiInstruction(tracer.emit(op, dst, src, attrs))


def label(result: Any, name: Any) -> None:
    """Label what a function has recorded, if anything; names differ on a core."""
    if not isinstance(result, NkiInstruction):
        return
    made = result._made
    tracer = trace.current("name=")
    if not isinstance(name, str):
        raise refuse(
            "sim_instruction_name",
            f"{made.op.name} is named {name!r}, expected a text; write name='{made.op.name}'",
        )
    if tracer.program.names.setdefault(name, {}).setdefault(tracer.grid_index, made) is not made:
        raise refuse(
            "sim_instruction_name",
            f"{made.op.name} is named '{name}' like an earlier instruction, expected names "
            "that differ; add a counter to it",
        )


def tensor(value: Any, what: str) -> View:
    """``value`` as a tensor, or the refusal for anything else."""
    if isinstance(value, View):
        return value
    trace.current(("" if what.startswith("nl.") else "nisa.") + what.partition(" ")[0])
    if isinstance(value, NkiInstruction):
        written = value._made.dst[0].label()
        raise refuse(
            "sim_operand_type",
            f"{what} got the handle of an instruction, expected a tensor; give the tile that it "
            f"wrote, {written}, and write its call alone, without =, as nisa returns no data",
        )
    raise no_tensor(value, what, "a tensor made with nl.ndarray or a parameter of the kernel")


def alike(what: str, *views: View, partitions: bool = True) -> tuple[View, ...]:
    """The operands in one common shape: equal partitions and elements per partition.

    Without ``partitions`` each keeps its own number of them.
    """
    shapes = [v.shape for v in views]
    first = shapes[0]
    if shapes.count(first) == len(shapes):
        return views
    for v in views[1:]:
        unequal = partitions and v.shape[0] != first[0]
        if unequal or v.free_size != views[0].free_size:
            kind = "partition" if unequal else "free"
            mine, other = (w.shape[0] if unequal else w.free_size for w in (views[0], v))
            raise refuse(
                "err_num_partition_mismatch" if unequal else "sim_shape_mismatch",
                f"{what} got {views[0].label()} and {v.label()}, expected equal {kind} total "
                f"elements, got {mine} and {other}; "
                + _stretching(views[0], v, what.startswith("nl.")),
            )
    sizes = refined([joined(v, 1) for v in views])
    if sizes is None:
        raise refuse(
            "sim_shape_mismatch",
            f"{what} got {', '.join(v.label() for v in views)}, expected free axes that divide "
            "each other; copy one operand into a contiguous tile first",
        )
    return tuple([v if v.shape[1:] == sizes else v.reshape((v.shape[0], *sizes)) for v in views])


def _stretching(like: View, other: View, sources: bool) -> str:
    """What makes an operand as large as the first one, where it is a column or a row.

    The first is a destination, unless both are ``sources``.
    """
    rows, columns = like.shape[0], like.free_size
    if other.shape[0] == rows and other.free_size == 1:
        return (
            f"give {called(other)}, a number for each partition, as operand0= of "
            f"nisa.tensor_scalar, or stretch it, {called(other)}.broadcast({other.ndim - 1}, "
            f"{columns})"
        )
    if other.shape[0] == 1 and other.free_size == columns:
        return (
            f"a row goes to all partitions with {spread(other, like)}, or where it is loaded, from "
            f"row_hbm.broadcast(0, {rows})"
        )
    tall, flat = (like, other) if like.free_size == 1 else (other, like)
    if sources and tall.free_size == flat.shape[0] == 1 < min(tall.shape[0], flat.free_size):
        return (
            f"a column with a row makes {(tall.shape[0], flat.free_size)}: take "
            f"nisa.tensor_scalar with data={spread(flat, tall)} and operand0={called(tall)}, into "
            "a dst of that shape, or give both one shape to pair their elements"
        )
    if (rows, columns) == (other.free_size, other.shape[0]):
        return (
            f"make {called(like)} {other.shape} where it holds the same, or turn one of them: "
            "nisa.nc_transpose into PSUM, and nisa.tensor_copy from there"
        )
    if other.on_chip and (told := blocks_first(other)):
        return told
    if other.size == 1:
        return (
            f"give one number for all as operand0= of nisa.tensor_scalar, after "
            f"nl.broadcast_to({called(other)}, ({rows}, 1))"
        )
    return f"{common_part(like, other)}: nothing is broadcast"


def joined(view: View, first: int) -> Shape:
    """Sizes of the axes from ``first`` on, those that continue each other taken as one."""
    sizes: list[int] = []
    step = 0
    for size, stride in zip(view.shape[first:], view.strides[first:]):
        if size == 1:
            continue
        if sizes and step == size * stride:
            sizes[-1] *= size
        else:
            sizes.append(size)
        step = stride
    return tuple(sizes) or (1,)


def refined(shapes: list[Shape]) -> Shape | None:
    """The coarsest shape that every one of ``shapes`` can be split into; all hold as many."""
    cuts = {1}
    for shape in shapes:
        size = 1
        for s in reversed(shape):
            size *= s
            cuts.add(size)
    steps = sorted(cuts, reverse=True)
    if any(a % b for a, b in itertools.pairwise(steps)):
        return None
    return tuple(a // b for a, b in itertools.pairwise(steps)) or (1,)


class naming:
    """Have refusals inside the block name what the author wrote, in front of what it became."""

    def __init__(self, expression: str) -> None:
        self.expression = expression

    def __enter__(self) -> None: ...

    def __exit__(self, _: Any, error: BaseException | None, *__: Any) -> None:
        if isinstance(error, NkiError) and not error.message.startswith(self.expression):
            say(error, f"{self.expression}: {error.message}")


# --- operators ------------------------------------------------------------------------------------
def token(op: Any, what: str) -> str:
    """Op code of an operator argument: a function of ``nki.language``.

    Raises:
        NkiError: anything else, numpy functions among them.
    """
    name = getattr(op, "nki_name", None)
    given = op if isinstance(op, str) else getattr(op, "__name__", type(op).__name__)
    meant = (name or given).removeprefix("nl.")
    if given == "divide":
        raise refuse(
            "sim_unknown_operator",
            f"{what} got operator {given}, which the ALU has not, expected another; multiply, "
            "nl.multiply, by 1 / number, or by nisa.reciprocal of a tile",
        )
    if isinstance(op, (View, int, float)):
        mend = "name it without a call" if isinstance(op, View) else "give numbers as operand0="
        raise refuse(
            "sim_unknown_operator",
            f"{what} got a {type_name(op)} as operator, expected a function of nki.language; "
            f"{mend}, the operator as op0=nl.add or op=nl.add",
        )
    if name is None or name in FUNCTIONS:
        meant = FUNCTIONS.get(meant, meant)
        raise refuse(
            "sim_unknown_operator",
            f"{what} got operator {given}, expected a function of nki.language such as nl.add; "
            + _instead_of(meant, op),
        )
    return name


def _instead_of(meant: str, op: Any) -> str:
    """The mend of what is no operator: its name in nl, a call apart, or what NKI has for it."""
    if meant in OPERATORS or meant in ACTIVATIONS:
        return f"write nl.{meant}"
    if (getattr(op, "__module__", "") or "").startswith("neuron_cpu"):
        return f"call it by itself, tile = nl.{meant}(x, ...): it takes several instructions"
    use = answer(meant, True, "nisa")
    return f"use {use}" if use else "write nl.add or another operator, nl.NAME"


USUAL = {*ARITHMETIC, *BITWISE} - {"mod", "fmod", "divide"}


def operator(op: Any, what: str) -> str:
    """The same for an operator of the ALU."""
    name = getattr(op, "nki_name", None)
    if name in USUAL:
        return name
    name = token(op, what)
    if name in LATER:
        needs(f"operator nl.{name}", 4)
    else:
        check_operator(name, what)
    if name in ("mod", "fmod"):
        warn(
            "sim_modulo",
            f"{what} with operator nl.{name}, which the ALU has not, expected another; subtract y "
            "* nl.floor(x / y) from x, the quotient as a product with nl.reciprocal(y)",
        )
    return name


UNARY = frozenset({"abs", "rsqrt", "reciprocal", "invert", "square", "relu"})


def step(what: str, op: str, value: Any, reverse: Any, src: list[View], exact: bool = True) -> Step:
    """One step of the ALU on ``src[0]``; unary operators need no value."""
    value = 0 if value is None and op in UNARY else value
    return any_step(what, op, value, reverse, src, exact)


def same_types(what: str, dst: View, *views: View) -> None:
    """Refuse operands of other types than the destination's."""
    for view in views:
        if view.dt is not dst.dt:
            raise refuse(
                "sim_types_differ",
                f"{what} got {view.label()} for {dst.label()}, expected equal types; "
                "cast with nisa.tensor_copy",
            )
