"""``dst[...] = op(...)`` and ``acc += nc_matmul(...)``: where a fresh result goes.

Functions of the language return fresh tiles. Assigning one moves the instruction's result into the
destination instead of recording a copy, as the device compiler does; only where that cannot be done
a copy is recorded. A result that has been moved and is used again after all gets its tile back.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ..device.dtypes import FLOAT32
from ..device.errors import NkiError, refuse, type_name, warn
from ..device.spec import Engine
from ..instructions.copies import copy_instruction
from ..instructions.entry import blocks_first
from ..program import trace
from ..program.program import Instruction, Program
from ..program.storage import Storage
from ..program.view import View, compose
from .compute import LoopReduction
from .copies import copy_into, fill, initial_fill


def assign(view: View, value: Any) -> None:
    """``view[...] = value``: move the fresh result there, or copy, or fill with a constant.

    Raises:
        NkiError: value of another type or more elements, or a destination in HBM.
    """
    if view.selects_nothing:
        return
    if isinstance(value, (int, float, np.generic)):
        fill(view, value)
        return
    if isinstance(value, LoopReduction):
        value.into(view)
        return
    if not isinstance(value, View):
        raise refuse(
            "sim_assignment_type",
            f"value of type {type_name(value)} assigned to {view.label()}, expected a "
            "tensor or a number; pass arrays to the kernel, and load them with nl.load",
        )
    if value.storage is view.storage and value.key() == view.key():
        return  # t[...] += x hands the updated view back to us
    if not view.storage.on_chip:
        raise refuse(
            "err_unsupported_memory",
            f"assignment into {view.label()}, expected a tensor in sbuf or psum; write HBM "
            "tensors with nl.store",
        )
    if was_skipped(value):
        return  # the destination keeps its content
    if value.storage.parts and value.is_full() and value.shape == view.shape:
        for box in value.storage.parts:  # and here what lies outside of the mask
            copy_into(view.slice_box(box), value.slice_box(box))
        return
    source = _conform(value, view)
    if not _redirect(view, source):
        copy_into(view, source)


def was_skipped(value: View) -> bool:
    """True for a result whose mask selected nothing, so that no instruction was recorded."""
    # A result that nothing produced and the kernel did not create, made since the last instruction.
    fresh = value.storage
    if fresh.producer is not None or fresh.source is not None or not fresh.on_chip:
        return False
    recorded = len(trace.current("assignment").program.instructions)
    return fresh.birth + fresh.followers == recorded


def _conform(value: View, view: View) -> View:
    """``value`` with the shape of ``view`` (size-1 axes and free-axis broadcasting)."""
    if value.shape == view.shape:
        return value
    if value.size == view.size and [s for s in value.shape if s != 1] == [
        s for s in view.shape if s != 1
    ]:
        if view.on_chip and value.shape[0] > 1 and (told := blocks_first(view)):
            raise refuse(
                "sim_reshape",
                f"{value.label()} is assigned to {view.label()}, a part of one partition, expected "
                f"one of {value.shape[0]}; {told}",
            )
        return value.reshape(view.shape)
    if value.size > view.size:
        raise refuse(
            "err_store_dst_shape_smaller_than_other_shape",
            f"value of shape {value.shape} assigned to a region of shape {view.shape}, "
            "expected equal shapes; slice the value or enlarge the destination",
        )
    return value.widened(view.shape)


# --- redirection ----------------------------------------------------------------------------------
class Redirect:
    """A fresh tile whose instruction writes into a destination instead.

    Attributes:
        fresh: the tile that the instruction was recorded with.
        view: where the result went, in the shape that the kernel assigned it with.
    """

    __slots__ = ("fresh", "view")

    def __init__(self, fresh: Storage, view: View) -> None:
        self.fresh, self.view = fresh, view
        fresh.watcher = self

    def before_read(self, view: View) -> None:
        """The result is used again: the fresh tile gets it back, and a copy follows.

        An instruction between the two may have written the destination, so reading from there
        would be wrong. The copy stands right behind the instruction, where the move was.

        Raises:
            NkiError: the result was added to an accumulation group and is nowhere by itself.
        """
        last, fresh = self.fresh.producer, self.fresh
        assert last is not None
        if last.attrs.accumulate:
            raise refuse(
                "sim_accumulated_result",
                f"the matmul result {view.label()} is read after it was added to "
                f"{self.view.label()}, where the hardware keeps the sum only, expected one use; "
                "copy it with nisa.tensor_copy first and add the copy",
            )
        fresh.watcher = fresh.producer = None
        moved = last.dst[0]
        whole = type(moved).whole(fresh)  # of a mask's box the same box
        if moved.shape != whole.shape:
            whole = whole.slice_box(self.view.box_of(moved))
        last.dst = (whole, *last.dst[1:])
        copy = copy_instruction(moved, last.dst[0], last.frame, last.source)
        tracer = trace.current("assignment")
        instructions = tracer.program.instructions
        at = len(instructions)  # it is one of the latest
        while instructions[at - 1] is not last:
            at -= 1
        instructions.insert(at, copy)
        tracer.meetings.join(copy, last)


def _redirect(view: View, value: View) -> bool:
    """Let the instruction that produced ``value`` write into ``view`` instead.

    Only the latest instruction: a later one may have read the destination's former content, unless
    it belongs to the same call and does not touch it. Only where the engine can write there in one
    pass, which the instruction's own check decides.
    """
    tracer = trace.current("assignment")
    fresh, instructions = value.storage, tracer.program.instructions
    last = fresh.producer
    if last is None or fresh.watcher is not None:
        return False
    at = len(instructions) - fresh.followers  # behind the instruction
    if at < 1 or instructions[at - 1] is not last or not value.is_full():
        return False
    if fresh.followers and any(
        view.storage is v.storage for one in instructions[at:] for v in (*one.dst, *one.src)
    ):
        return False
    if view.storage.buffer == "psum" and last.op.engine_of(last) is Engine.GPSIMD:
        warn(
            "sim_gpsimd_psum",
            f"{last.op.name} on GpSimdE is assigned to {view.label()}: GpSimdE has no PSUM port, "
            "the compiler adds a copy, expected a tile in sbuf; copy it explicitly",
        )
        return False
    if view.storage.buffer not in last.op.writes:
        return False
    if len(last.dst) > 1 and _others_touch(last, view.storage, again=tracer.machine is not None):
        return False
    # A mask may have cut the result: the same box of the destination, in the result's own axes.
    target = view
    if view.shape != fresh.shape:
        if view.size != fresh.size:
            return False
        try:
            target = view.reshape(fresh.shape)
        except NkiError:  # a strided destination
            return False
    moved = compose(last.dst[0], target)
    if moved is None:
        return False
    before = last.dst, last.attrs
    if last.attrs.raw and moved.dt is not last.dst[0].dt:
        if not last.op.is_copy and not _is_tensor_engine_result(last, moved):
            return False  # a transpose moves bits, its cast is an instruction
        last.attrs = tracer.shared_attrs(replace(last.attrs, raw=False))
    last.dst = (moved, *last.dst[1:])
    try:
        last.op.check(last, tracer.legal)
    except NkiError:  # legal into a tile of its own, not into this one
        last.dst, last.attrs = before
        return False
    Redirect(fresh, view)
    if moved.storage.groups is not None:
        moved.storage.groups.written(moved, by_matmul=last.op.multiplies)
    if tracer.machine is not None:
        tracer.machine.run(last)
    return True


def _others_touch(last: Instruction, target: Storage, again: bool) -> bool:
    """True where moving the first result would change another result, or be changed by it.

    Results may lie in the destination's own tensor. In eager mode the instruction runs ``again``,
    so no result may lie over an operand.
    """
    further = {view.storage for view in last.dst[1:]}
    return target in further or (again and any(view.storage in further for view in last.src))


def _is_tensor_engine_result(last: Instruction, moved: View) -> bool:
    """Whether a transpose goes to fp32 in PSUM, as every result of TensorE on this core does.

    AWS's flash attention gives its transposes fp32 tiles there unless the core is a Trainium2.
    """
    by_tensor = last.op.engine is Engine.TENSOR and last.attrs.engine is not Engine.VECTOR
    return by_tensor and moved.storage.buffer == "psum" and moved.dt is FLOAT32


# --- accumulation in PSUM -------------------------------------------------------------------------
def accumulate(view: View, value: Any) -> bool:
    """``view += value`` of a matmul just recorded and a PSUM tile: accumulate there instead.

    Returns:
        False for anything else, which is an element-wise update.

    Raises:
        NkiError: another number of elements, or a region that overlaps an earlier group in part.
    """
    tracer = trace.current("in-place operator")
    instructions = tracer.program.instructions
    if not instructions or not isinstance(value, View) or view.storage.buffer != "psum":
        return False
    last = instructions[-1]
    if value.storage.producer is not last or value.storage.watcher is not None:
        return False
    if not last.op.multiplies:
        return False
    if view.size != value.size:
        raise refuse(
            "err_store_dst_shape_smaller_than_other_shape",
            f"matmul result of shape {value.shape} is accumulated into {view.shape}, expected "
            "equal shapes; slice the PSUM tile",
        )
    moved = compose(last.dst[0], view if view.shape == value.shape else view.reshape(value.shape))
    assert moved is not None  # a fresh result's box always maps onto a view of its shape
    groups = view.storage.groups
    first = groups is not None and groups.begin(moved)
    if groups is None or groups.holds_other(moved):
        why = "nl.zeros did not make" if groups is None else "no matmul has written last"
        warn(
            "sim_accumulation_start",
            f"matmul accumulates into {view.label()}, which {why}; on this core accumulating onto "
            "content written by another instruction is undefined; create the tile with "
            "nl.zeros(..., buffer=nl.psum) and let only matmuls write it",
        )
    last.attrs = tracer.shared_attrs(last.attrs.grouped(first))
    last.dst = (moved,)
    last.op.check(last, tracer.legal)
    Redirect(value.storage, view)
    if tracer.machine is not None:
        tracer.machine.run(last)
    return True


def insert_initial_fills(program: Program) -> None:
    """Put the fills of zeros that were read into a finished program, where the tiles were made."""
    read = [
        s
        for s in program.storages
        if s.initial is not None or (s.groups is not None and s.groups.needs_zeros)
    ]
    for storage in sorted(read, key=lambda s: s.birth, reverse=True):  # later ones stay in place
        program.instructions.insert(storage.birth, initial_fill(storage))
