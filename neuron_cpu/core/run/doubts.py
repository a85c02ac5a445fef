"""Warnings about values while a kernel runs: integers that fp32 does not hold, and open questions.

Engines compute in fp32, integers of 32 bits among them but where GpSimdE adds tiles. Which row of a
scatter wins, what a maximum makes of NaN and what a scale of all ones means depends on data, and
sources of the current language leave it open. A kernel gets one warning for each place where this
happens.
"""

import math
from collections.abc import Sequence

import torch

from ..device.dtypes import INT32, UINT32
from ..device.errors import warn
from .memory import Arena, gather_index, rows_inside, widen
from .merge import Op, Ref
from .products import Step

ORDERED = ("maximum", "minimum", "abs_max", "abs_min")  # what chooses by comparing
NO_SCALE = 255
WORDS = (INT32, UINT32)
EXACT = 1 << 24


def watched(step: Step, op: Op, arena: Arena, today: bool) -> Step | None:
    """The step with a check of its values; None where no question can arise.

    In the older language (not ``today``) it checks only integers that fp32 does not hold.
    """
    if _rounds_integers(op):
        return lambda: _step_of_integers(step, op, arena)
    look, first = _look(op, arena) if today else (None, False)
    if look is None:
        return None

    def told() -> None:
        if first:
            look()
        step()
        if not first:
            look()

    return told


def _look(op: Op, arena: Arena) -> tuple[Step | None, bool]:
    """The values to check, and whether before the step instead of behind it."""
    spec = op.instruction.op
    tiles = [ref.by_data[0] for ref in op.dst if ref.by_data is not None]
    if any(math.prod(tile.shape[op.batch :]) > 1 for tile in tiles):
        return lambda: _look_at_rows(op, arena), True
    if spec.scaled:
        return lambda: _look_at_scales(op, arena), True
    if spec.compares == "operands":
        return lambda: _look_for_nan(spec.name, op.src, arena), True
    if spec.compares == "results" or _compares(op):
        return lambda: _look_for_nan(spec.name, op.dst, arena), False
    return None, False


# --- integers in fp32 -----------------------------------------------------------------------------
def _rounds_integers(op: Op) -> bool:
    """Whether 32-bit integers become 32-bit integers by way of fp32."""
    by_way = not (op.attrs.raw or op.attrs.bits or op.instruction.op.is_dma)
    wide = any(ref.dt in WORDS for ref in op.src) and all(ref.dt in WORDS for ref in op.dst)
    return by_way and wide


def _step_of_integers(step: Step, op: Op, arena: Arena) -> None:
    """The step, with one warning where an operand is, or a result may have been, above 2^24."""
    told = _tell_of_integers(op, arena, op.src, EXACT + 1, "computes with")
    step()
    if not told:  # 2^24 + 1 is 2^24 in fp32
        _tell_of_integers(op, arena, op.dst, EXACT, "makes")


def _tell_of_integers(op: Op, arena: Arena, refs: Sequence[Ref], least: int, does: str) -> bool:
    for ref in refs:
        if ref.dt not in WORDS:
            continue
        values = arena.of(ref.memory)[gather_index(ref, arena, skip=True)].to(torch.int64)
        most = int(values.abs().max()) if values.numel() else 0
        if most >= least:
            warn(
                "sim_inexact_integers",
                f"{op.instruction.op.name} {does} {most} of "
                f"{ref.memory.storage.label()} in fp32, which holds every integer up to 2^24 only, "
                "expected smaller ones: the last digits are lost; split the number by shifts, or "
                "add int32 tiles with nisa.tensor_tensor on GpSimdE (SDK 2.26 and later)",
            )
            return True
    return False


# --- duplicate rows -------------------------------------------------------------------------------
def _look_at_rows(op: Op, arena: Arena) -> None:
    for ref in op.dst:
        if ref.by_data is None:
            continue
        tile = ref.by_data[0]
        rows = arena.view(tile).to(torch.int64).reshape(-1, math.prod(tile.shape[op.batch :]))
        inside = rows_inside(ref, arena).reshape(rows.shape) if op.attrs.skip else None
        for k, line in enumerate(rows):  # each joined iteration has indices of its own
            own = line if inside is None else line[inside[k]]
            values, counts = own.unique(return_counts=True)
            if len(values) < len(own):
                adds, row = op.attrs.accumulate, int(values[counts > 1][0])
                does = "adds to" if adds else "writes"
                warn(
                    "sim_duplicate_rows",
                    f"{op.instruction.op.name} {does} row {row} of "
                    f"{ref.memory.storage.label()} several times in one transfer: sources leave "
                    "open in which order, expected rows that differ; here "
                    + ("every one is added" if adds else "one of them stays"),
                )
                return


# --- NaN and scales -------------------------------------------------------------------------------
def _compares(op: Op) -> bool:
    """Whether it takes the larger or smaller of floats; missing fields do not matter."""
    attrs = op.attrs
    names = [getattr(attrs, name, None) for name in ("op", "op0", "op1", "reduce_op")]
    names += [step.op for step in getattr(attrs, "steps", ())]
    reduced = op.instruction.op.compares == "reduction" and attrs.reduce_axes
    return bool(reduced) or any(name in ORDERED for name in names)


def _values(ref: Ref, arena: Arena) -> torch.Tensor:
    if ref.by_data is not None or min(ref.strides, default=0) < 0:
        raw = arena.of(ref.memory)[gather_index(ref, arena, skip=True)]
    else:
        raw = arena.view(ref)
    return widen(raw, arena.kept(ref), False)


def _look_for_nan(name: str, refs: tuple[Ref, ...], arena: Arena) -> None:
    for ref in refs:
        if ref.dt.is_float and bool(_values(ref, arena).isnan().any()):
            warn(
                "sim_nan_compared",
                f"{name} compares elements of which one is NaN: sources leave open what comes out, "
                "expected numbers; here NaN is the largest to max8 and a maximum or minimum with "
                "it is NaN, while searches never find it",
            )
            return


def _look_at_scales(op: Op, arena: Arena) -> None:
    for ref in op.src[2:]:
        if ref.dt.itemsize == 1 and bool((arena.view(ref) == NO_SCALE).any()):
            warn(
                "sim_scale_of_ones",
                "nc_matmul_mx with a scale of 0xFF: sources leave open what it does, expected at "
                "most 0xFE; here it makes NaN of its group",
            )
            return
