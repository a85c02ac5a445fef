"""Loops, the launch grid, and reductions across the iterations and instances of both."""

import linecache
import math
import re
from typing import Any

import numpy as np

from ..device.dtypes import Shape, to_dtype
from ..device.errors import refuse, user_frame
from ..instructions.recorder import record
from ..instructions.vector import ALL_REDUCE, BinaryAttrs
from ..program import trace
from ..program.view import View
from . import compute, copies
from .operands import name_of

# --- loops ----------------------------------------------------------------------------------------
affine_range = trace.observe_loop("affine", "affine_range")
sequential_range = trace.observe_loop("sequential", "sequential_range")


def static_range(*args: int, **_: Any) -> range:
    """``nl.static_range(...)``: fully unrolled while tracing; indices are Python ints."""
    return range(*(int(a) for a in args))


# --- launch grid ----------------------------------------------------------------------------------
def program_id(axis: int) -> int:
    """Index of the running grid instance on ``axis``."""
    return _on_axis("program_id", axis, trace.current("nl.program_id").grid_index)


def _on_axis(what: str, axis: int, values: Shape) -> int:
    if not 0 <= axis < len(values):
        known = f", or write {what}({len(values) - 1}), its last axis" * bool(values)
        raise refuse(
            "sim_program_axis",
            f"{what}({axis}) in a launch grid of rank {len(values)}, expected an axis below it; "
            f"launch with a size for each axis, kernel[grid](...) or --grid {'2x' * axis}2{known}",
        )
    return values[axis]


def num_programs(axes: Any = None) -> int:
    """Number of grid instances along ``axes`` (default: all)."""
    grid = trace.current("nl.num_programs").program.grid
    if axes is None:
        return int(np.prod(grid, dtype=int))
    chosen = axes if isinstance(axes, (tuple, list)) else (axes,)
    return math.prod(_on_axis("num_programs", a, grid) for a in chosen)


def program_ndim() -> int:
    """Rank of the launch grid."""
    return len(trace.current("nl.program_ndim").program.grid)


# --- reductions across iterations and instances ---------------------------------------------------
_NAME = re.compile(r"^\s*([A-Za-z_]\w*)\s*=\s*[\w.]*loop_reduce\(")


def loop_reduce(
    x: View, op: Any, loop_indices: Any, *, dtype: Any = None, mask: Any = None, **_: Any
) -> Any:
    """Combine ``x`` into the tile on the left of the assignment in every iteration.

    ``b[...] = nl.loop_reduce(a, op, [k])`` is ``b[...] = b op a``; with ``b = nl.loop_reduce(...)``
    the tile is what ``b`` named before. It must hold its initial value (0 for sums).
    """
    pending = compute.LoopReduction(x, name_of(op), mask)
    # Only the source line tells ``b = nl.loop_reduce(...)`` from ``b[...] = nl.loop_reduce(...)``.
    frame = user_frame(1)
    line = "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    match = _NAME.match(line)
    if match is None or frame is None:
        return pending
    target = frame.f_locals.get(match[1])
    if not isinstance(target, View):
        raise refuse(
            "sim_loop_reduce_target",
            f"loop_reduce is assigned to '{match[1]}', which holds no tile yet, expected one that "
            f"was created before the loop; write {match[1]} = nl.zeros(...) before it",
        )
    pending.into(target)
    return target


def all_reduce(
    x: View,
    op: Any,
    program_axes: Any,
    *,
    dtype: Any = None,
    mask: Any = None,
    parallel_reduce: bool = True,
    asynchronous: bool = False,
    **_: Any,
) -> View:
    """Reduce ``x`` over the instances of a launch grid that differ on ``program_axes`` only."""
    tracer = trace.current("nl.all_reduce")
    axes = program_axes if isinstance(program_axes, (tuple, list)) else (program_axes,)
    grid, at = tracer.program.grid, tracer.grid_index
    count = math.prod(grid[int(a)] for a in axes) if grid else 1
    dt = x.dt if dtype is None else to_dtype(dtype)
    if count == 1:
        return copies.tensor_copy(x, dtype=dt, mask=mask)
    if mask is not None or tracer.machine is not None:
        raise refuse(
            "sim_all_reduce",
            f"all_reduce over {count} grid instances with a mask or in eager mode, where instances "
            "run one after the other, expected neither; slice the operand, unset NKI_CPU_EAGER",
        )
    others = tuple(k for a, k in enumerate(at) if a not in [int(b) for b in axes])
    return _meet(tracer, x, dt, name_of(op), count, others)


def _meet(tracer: trace.Tracer, source: View, dt: Any, op: str, count: int, others: Shape) -> View:
    """Bring one instance's part; the last one records the reduction for all of the group."""
    meetings = tracer.meetings
    result = tracer.whole(tracer.storage(source.shape, dt, "sbuf"))
    # Instances of a group meet at the same phase, with the same operator, at equal places on the
    # axes that are not reduced.
    key = (meetings.phase, op, others)
    parts = meetings.open.setdefault(key, [])
    parts.append((source, result))
    if len(parts) == count:
        del meetings.open[key]
        # One instruction for all, of no instance: half a phase later than what brings the parts,
        # half a phase earlier than what reads the results.
        frame, tracer.frame = tracer.frame, None
        sources, results = zip(*parts)
        made = record(ALL_REDUCE, results, sources, BinaryAttrs(op=op))
        tracer.frame = frame
        meetings.phases[id(made)] = meetings.phase + 0.5
    meetings.phase += 1
    return result


# --- kinds of grids -------------------------------------------------------------------------------
def gemm_grid(*_: Any, **__: Any) -> Shape:
    """A launch grid for matrix products, of which only the name is public."""
    raise NotImplementedError("nki.language.gemm_grid has no public description of its arguments")


def gemm_stationary_grid(*_: Any, **__: Any) -> Shape:
    """A launch grid for stationary operands, of which only the name is public."""
    raise NotImplementedError(
        "nki.language.gemm_stationary_grid has no public description of its arguments"
    )


class nc(int):
    """``nl.nc(n)``: a grid axis over n physical cores; a plain axis on this core."""


def spmd_dim(first: Any, second: Any) -> int:
    """A grid axis of ``first * second`` instances; the order of cores has no effect here."""
    return int(first) * int(second)
