"""Accumulators that outlive an instruction: ScalarE's sums and VectorE's reductions.

A hidden (P, 1) fp32 tile stands for the registers of an engine. The usual reset-and-reduce into
``reduce_res`` needs none: the instruction has a second result. Only if a later instruction goes on
from the registers, a copy of that result is put behind the instruction that made it.
"""

from dataclasses import dataclass, replace
from typing import Any

from ..device.dtypes import FLOAT32
from ..device.errors import refuse
from ..instructions.arguments import check_total, real
from ..instructions.copies import MEMSET, TENSOR_COPY, FillAttrs, copy_attrs, copy_instruction
from ..instructions.entry import OpSpec
from ..instructions.recorder import record
from ..instructions.vector import TENSOR_SCALAR, TENSOR_TENSOR, BinaryAttrs, Step, StepsAttrs
from ..program import trace
from ..program.attributes import Attrs
from ..program.program import Instruction
from ..program.view import View
from .operands import NkiInstruction, put, reduce_cmd, tensor

SCALAR, VECTOR = "ScalarE", "VectorE"
IDENTITY = {
    "add": 0.0,
    "multiply": 1.0,
    "maximum": float("-inf"),
    "minimum": float("inf"),
    "subtract": 0.0,
    "abs_max": 0.0,
    "abs_min": float("inf"),
}


@dataclass
class Reduction:
    """An instruction's use of the accumulators of its engine.

    Attributes:
        engine: whose they are.
        op: operator that joins this call's result with them.
        partitions: of its operands.
        what: its name.
        initial: what ``load_reduce`` begins with.
    """

    engine: str
    op: str
    partitions: int
    what: str
    initial: float = 0.0


class Registers:
    """Accumulators of one engine while a kernel is recorded.

    Attributes:
        tile: the hidden tile, once something needs it.
        result: the instruction and tile that hold their content instead.
        constant: their content, where a reset was the last thing.
    """

    def __init__(self) -> None:
        self.tile: View | None = None
        self.result: tuple[Instruction, View] | None = None
        self.constant: float | None = None

    def hold(
        self,
        tile: View | None = None,
        result: tuple[Instruction, View] | None = None,
        constant: float | None = None,
    ) -> None:
        self.tile, self.result, self.constant = tile, result, constant

    def held(self, how: Reduction) -> View:
        """The tile with their content.

        Raises:
            NkiError: nothing has been put there yet, or for other partitions.
        """
        if self.result is not None:
            self.hold(tile=_copied_behind(*self.result))
        elif self.constant is not None:
            tile = hidden(how.partitions)
            record(MEMSET, (tile,), (), FillAttrs(value=self.constant))
            self.hold(tile=tile)
        if self.tile is None or self.tile.shape[0] != how.partitions:
            raise refuse(
                "sim_reduce_registers",
                f"{how.what} reads accumulators that no instruction has set for "
                f"{how.partitions} partitions, expected nisa.reduce_cmd.reset_reduce before; add "
                "reduce_cmd=nisa.reduce_cmd.reset_reduce to the first call of the reduction",
            )
        return self.tile


def hidden(partitions: int) -> View:
    """A (P, 1) fp32 tile that the kernel does not see."""
    tracer = trace.current("an accumulator")
    return tracer.whole(tracer.storage((partitions, 1), FLOAT32, "sbuf", name="accumulators"))


def _copied_behind(made: Instruction, result: View) -> View:
    """A copy of a second result, put right behind the instruction that made it."""
    tile = hidden(result.shape[0])
    instructions = trace.current("an accumulator").program.instructions
    at = max(k for k, one in enumerate(instructions) if one is made)
    instructions.insert(at + 1, copy_instruction(tile, result, made.frame, made.source))
    return tile


def reducing(
    how: Reduction,
    command: Any,
    reduce_res: Any,
    op: OpSpec,
    dst: View,
    src: tuple[View, ...],
    attrs: Attrs,
) -> NkiInstruction:
    """Record ``op`` with ``reduce_cmd``: a second result reduces ``dst`` over all free axes."""

    def into(total: View) -> NkiInstruction:
        return put(op, (dst, total), src, replace(attrs, reduce_axes=dst.ndim - 1))

    if not isinstance(command, reduce_cmd):
        raise refuse(
            "sim_reduce_command",
            f"{how.what} with reduce_cmd={command!r}, expected a member of nisa.reduce_cmd; "
            "write nisa.reduce_cmd.reset_reduce or another",
        )
    tracer = trace.current(f"nisa.{how.what}")
    registers = tracer.accumulators.setdefault(how.engine, Registers())
    target = None if reduce_res is None else _target(reduce_res, how)
    if command in (reduce_cmd.idle, reduce_cmd.reset):
        made = put(op, (dst,), src, attrs)
        if command is reduce_cmd.reset:
            registers.hold(constant=IDENTITY[how.op])
    elif command is reduce_cmd.reset_reduce or (
        command is reduce_cmd.reduce and registers.constant == IDENTITY[how.op]
    ):
        # eager mode cannot go back to make a copy later, and a narrow result would be rounded
        if target is not None and target.dt is FLOAT32 and tracer.machine is None:
            assert target is not None
            made = into(target)
            registers.hold(result=(made._made, target))
            return made
        part = hidden(how.partitions)
        made = into(part)
        registers.hold(tile=part)
    else:
        before = None if command is reduce_cmd.load_reduce else registers.held(how)
        part = hidden(how.partitions)
        made = into(part)
        if before is None:
            record(TENSOR_SCALAR, (part,), (part,), StepsAttrs(steps=(Step(how.op, how.initial),)))
        else:
            record(TENSOR_TENSOR, (part,), (before, part), BinaryAttrs(op=how.op))
        registers.hold(tile=part)
    if target is not None:
        held = registers.held(how)
        record(TENSOR_COPY, (target,), (held,), copy_attrs(target.dt, held.dt))
    return made


def running(how: Reduction, command: Any, initial: Any) -> tuple[View | None, float]:
    """The start of a running reduction: a tile or a constant."""
    if command is reduce_cmd.load_reduce:
        return None, real(initial, f"{how.what} initial value")
    if command is reduce_cmd.reset_reduce:
        return None, IDENTITY[how.op]
    if command is not reduce_cmd.reduce:
        raise refuse(
            "sim_reduce_command",
            f"{how.what} with reduce_cmd={command!r}, expected reset_reduce, load_reduce or "
            "reduce; "
            "begin with nisa.reduce_cmd.reset_reduce",
        )
    tracer = trace.current(f"nisa.{how.what}")
    return tracer.accumulators.setdefault(how.engine, Registers()).held(how), 0.0


def keep_result(how: Reduction, made: NkiInstruction, result: View) -> None:
    """The accumulators hold ``result`` (P, 1), which an instruction has just written."""
    tracer = trace.current(f"nisa.{how.what}")
    registers = tracer.accumulators.setdefault(how.engine, Registers())
    registers.hold(result=(made._made, result))
    if tracer.machine is not None:  # eager mode cannot go back later
        tile = hidden(how.partitions)
        record(TENSOR_COPY, (tile,), (result,), copy_attrs(tile.dt, result.dt))
        registers.hold(tile=tile)


def _target(reduce_res: Any, how: Reduction) -> View:
    """The (P, 1) tile that receives the accumulators."""
    total = tensor(reduce_res, f"{how.what} reduce_res")
    check_total(total, how.partitions, how.what)
    return total if total.ndim == 2 else total.reshape((how.partitions, 1))
