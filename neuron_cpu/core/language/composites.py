"""``nki.language``, second part: functions that expand into several instructions, HBM constants,
reductions across loops and grid instances, printing.

Signatures: aws-neuron-sdk v2.21.1, general/nki/api/nki/language/__init__.py. How the vendor
lowers abs, ceil, floor, trunc, cos and tan is not public; documented instructions make them here.
"""

from __future__ import annotations

import builtins
import linecache
import math
import re
from typing import Any

import ml_dtypes
import numpy as np

from ..device.dtypes import BOOL, FLOAT32, INT32, to_dtype
from ..device.errors import refuse, user_frame, warn
from ..instructions import copies, dma, gpsimd, operators, scalar, vector
from ..instructions.arguments import tile
from ..instructions.recorder import record
from ..program import masks, trace
from ..program.view import View
from . import nl as language
from .nl import named


# --- element-wise ---------------------------------------------------------------------------------
def abs(x: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """``|x|`` on VectorE."""
    return vector.tensor_scalar(tile(x, "abs"), "abs", 0, dtype=dtype, mask=mask)


def logical_not(x: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """1 where ``x`` is zero, else 0; bool unless ``dtype``."""
    source = tile(x, "logical_not")
    dt = BOOL if dtype is None else dtype
    return vector.tensor_scalar(source, "logical_not", 0, dtype=dt, mask=mask)


_WHOLE = 2.0**23  # from here on every fp32 number is whole


def _rounded(x: View, step: str, dtype: Any, mask: Any) -> View:
    """x rounded to nearest by a cast to int32, moved by one where the direction asks for it.

    ``step`` is "greater" (floor: subtract 1 where the rounded value is above x) or "less" (ceil).
    """
    near = copies.tensor_copy(
        copies.tensor_copy(x, dtype=INT32, mask=mask), dtype=FLOAT32, mask=mask
    )
    off = vector.tensor_tensor(near, x, step, dtype=FLOAT32, mask=mask)
    towards = "subtract" if step == "greater" else "add"
    moved = vector.tensor_tensor(near, off, towards, dtype=FLOAT32, mask=mask)
    size = vector.tensor_scalar(x, "abs", 0, op1="less", operand1=_WHOLE, dtype=FLOAT32, mask=mask)
    return language.where(size, moved, x, dtype=x.dt if dtype is None else dtype, mask=mask)


def floor(x: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """Largest whole number not above ``x``."""
    return _rounded(tile(x, "floor"), "greater", dtype, mask)


def ceil(x: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """Smallest whole number not below ``x``."""
    return _rounded(tile(x, "ceil"), "less", dtype, mask)


def trunc(x: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """``x`` without its fraction: sign(x) * floor(|x|)."""
    source = tile(x, "trunc")
    size = vector.tensor_scalar(source, "abs", 0, dtype=FLOAT32, mask=mask)
    sign = scalar.activation("sign", source, dtype=FLOAT32, mask=mask)
    dt = source.dt if dtype is None else to_dtype(dtype)
    return vector.tensor_tensor(floor(size, mask=mask), sign, "multiply", dtype=dt, mask=mask)


def _angle(x: View, shift: float, turns: View, mask: Any) -> View:
    """x + shift - 2 pi turns, kept inside [-pi, pi]; 2 pi in two parts, so that turns cancel."""
    count = copies.tensor_copy(turns, dtype=FLOAT32, mask=mask)
    coarse = 6.28125  # 2 pi in 9 bits: its product with a whole number is exact up to 2^15
    first = vector.tensor_scalar(count, "multiply", -coarse, dtype=FLOAT32, mask=mask)
    rest = vector.tensor_scalar(count, "multiply", coarse - 2 * math.pi, dtype=FLOAT32, mask=mask)
    reduced = vector.tensor_tensor(x, first, "add", dtype=FLOAT32, mask=mask)
    reduced = vector.tensor_tensor(reduced, rest, "add", dtype=FLOAT32, mask=mask)
    moved = vector.tensor_scalar(reduced, "add", shift, dtype=FLOAT32, mask=mask)
    return vector.tensor_scalar(
        moved, "minimum", math.pi, op1="maximum", operand1=-math.pi, dtype=FLOAT32, mask=mask
    )


def _shifted_sine(x: View, shift: float, dtype: Any, mask: Any) -> View:
    """sin(x + shift): ScalarE's sine takes [-pi, pi] only, so whole turns go first."""
    # x / 2 pi, and the shift as a part of a turn; the cast to int32 rounds to whole turns.
    per_turn = 0.5 / math.pi
    turns = vector.tensor_scalar(
        x, "multiply", per_turn, op1="add", operand1=shift * per_turn, dtype=INT32, mask=mask
    )
    angle = _angle(x, shift, turns, mask)
    return scalar.activation("sin", angle, dtype=dtype, mask=mask)


def cos(x: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """Cosine as sin(x + pi/2) with whole turns removed; ScalarE has none of its own."""
    source = tile(x, "cos")
    return _shifted_sine(source, math.pi / 2, source.dt if dtype is None else dtype, mask)


def tan(x: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """Tangent as sine times the reciprocal of the cosine."""
    source = tile(x, "tan")
    sine = _shifted_sine(source, 0.0, FLOAT32, mask)
    inverse = vector.reciprocal(_shifted_sine(source, math.pi / 2, FLOAT32, mask), mask=mask)
    dt = source.dt if dtype is None else to_dtype(dtype)
    return vector.tensor_tensor(sine, inverse, "multiply", dtype=dt, mask=mask)


def dropout(x: Any, rate: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """``x`` with elements set to zero with probability ``rate`` (a number or [P, 1])."""
    return gpsimd.dropout(x, rate, dtype=dtype, mask=mask)


# --- reductions -----------------------------------------------------------------------------------
def var(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """Population variance over the last free axes: mean of the squared distances to the mean."""
    source = tile(x, "var")
    dt = (source.dt if source.dt.is_float else FLOAT32) if dtype is None else to_dtype(dtype)
    count = language._count(source, axis)
    total = vector.tensor_reduce("add", source, axis, dtype=FLOAT32, mask=mask, keepdims=True)
    centre = vector.tensor_scalar(total, "multiply", 1.0 / count, dtype=FLOAT32)
    apart = vector.tensor_tensor(
        source, centre.expand(source.shape), "subtract", dtype=FLOAT32, mask=mask
    )
    squares = vector.tensor_tensor(apart, apart, "multiply", dtype=FLOAT32, mask=mask)
    spread = vector.tensor_reduce("add", squares, axis, dtype=FLOAT32, mask=mask)
    return vector.tensor_scalar(spread, "multiply", 1.0 / count, dtype=dt)


def all(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """1 where all elements along the last free axes are nonzero; bool unless ``dtype``."""
    dt = BOOL if dtype is None else dtype
    return vector.tensor_reduce("logical_and", tile(x, "all"), axis, dtype=dt, mask=mask)


_NAME = re.compile(r"^\s*([A-Za-z_]\w*)\s*=\s*[\w.]*loop_reduce\(")


def loop_reduce(
    x: Any, op: Any, loop_indices: Any, *, dtype: Any = None, mask: Any = None, **_: Any
) -> Any:
    """Combine ``x`` into the tile on the left of the assignment in every iteration.

    ``b[...] = nl.loop_reduce(a, op, [k])`` is ``b[...] = b op a``; with ``b = nl.loop_reduce(...)``
    the tile is what ``b`` named before. It must hold its initial value (0 for sums).
    """
    pending = vector.LoopReduction(tile(x, "loop_reduce"), operators.name_of(op), mask)
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
    x: Any,
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
    source = tile(x, "all_reduce")
    axes = program_axes if isinstance(program_axes, (tuple, list)) else (program_axes,)
    grid, at = tracer.program.grid, tracer.grid_index
    count = math.prod(grid[int(a)] for a in axes) if grid else 1
    dt = source.dt if dtype is None else to_dtype(dtype)
    if count == 1:
        return copies.tensor_copy(source, dtype=dt, mask=mask)
    if mask is not None or tracer.machine is not None:
        raise refuse(
            "sim_all_reduce",
            f"all_reduce over {count} grid instances with a mask or in eager mode, where instances "
            "run one after the other, expected neither; slice the operand, unset NKI_CPU_EAGER",
        )
    others = tuple(k for a, k in enumerate(at) if a not in [int(b) for b in axes])
    return _meet(tracer, source, dt, operators.name_of(op), count, others)


def _meet(
    tracer: trace.Tracer, source: View, dt: Any, op: str, count: int, others: tuple[int, ...]
) -> View:
    """Bring one instance's part; the last one records the reduction for all of the group."""
    meetings = tracer.meetings
    result = tracer.whole(tracer.storage(source.shape, dt, "sbuf"))
    key = (meetings.phase, op, others)
    parts = meetings.open.setdefault(key, [])
    parts.append((source, result))
    if len(parts) == count:
        del meetings.open[key]
        frame, tracer.frame = tracer.frame, None
        sources, results = zip(*parts)
        made = record(vector.ALL_REDUCE, results, sources, vector.BinaryAttrs(op=op))
        tracer.frame = frame
        meetings.phases[id(made)] = meetings.phase + 0.5
    meetings.phase += 1
    return result


# --- HBM ------------------------------------------------------------------------------------------
def atomic_rmw(dst: Any, value: Any, op: Any, *, mask: Any = None) -> None:
    """``dst[rows] op= value`` in HBM, rows chosen by an index tile; add only, duplicates add up."""
    target = tile(dst, "atomic_rmw")
    name = operators.name_of(op)
    if target.indirect is None or target.on_chip or name != "add":
        raise refuse(
            "sim_atomic_rmw",
            f"atomic_rmw of {target.label()} with '{name}', expected add and an HBM tensor whose "
            "rows an index tile chooses; use nl.store for rows known while tracing",
        )
    dma.move(target, tile(value, "atomic_rmw"), mask, accumulate=True)


def shared_constant(constant: Any, dtype: Any = None, **_: Any) -> View:
    """A numpy array as a constant in HBM; load it before use."""
    tracer = trace.current("nl.shared_constant")
    data = np.asarray(constant)
    dt = to_dtype(data.dtype if dtype is None else dtype)
    made = tracer.storage(data.shape, dt, "hbm", "const", "constant")
    made.frame = None  # one constant, in whatever loop it is asked for
    made.data = data.astype(dt.numpy)
    return tracer.whole(made)


def shared_identity_matrix(n: int, dtype: Any = np.uint8, **_: Any) -> View:
    """The n x n identity as a constant in HBM."""
    return shared_constant(np.eye(int(n)), dtype)


# --- types, printing, grid ------------------------------------------------------------------------
def static_cast(arr: Any, dtype: Any) -> Any:
    """A tile or number as another type."""
    if isinstance(arr, View):
        return language.copy(arr, dtype=dtype)
    return to_dtype(dtype).numpy.type(arr)


def finfo(dtype: Any) -> Any:
    """Limits of a floating-point type (``min``, ``max``, ``eps``, ...)."""
    return ml_dtypes.finfo(to_dtype(dtype).numpy)


def device_print(prefix: Any, x: Any, *, mask: Any = None, **_: Any) -> None:
    """Print a tile's values in eager mode (NKI_CPU_EAGER=1); nothing is computed otherwise."""
    tracer = trace.current("nl.device_print")
    if tracer.machine is None:
        warn(
            "sim_device_print",
            "device_print outside of eager mode prints nothing, expected NKI_CPU_EAGER=1; set it",
        )
        return
    if masks.region(mask, tile(x, "device_print").shape) is not masks.EMPTY:
        print(prefix, x.numpy())


def gemm_grid(*_: Any, **__: Any) -> tuple[int, ...]:
    """A launch grid for matrix products, of which only the name is public."""
    raise NotImplementedError("nki.language.gemm_grid has no public description of its arguments")


def gemm_stationary_grid(*_: Any, **__: Any) -> tuple[int, ...]:
    """A launch grid for stationary operands, of which only the name is public."""
    raise NotImplementedError(
        "nki.language.gemm_stationary_grid has no public description of its arguments"
    )


class nc(int):
    """``nl.nc(n)``: a grid axis over n physical cores; a plain axis on this core."""


def spmd_dim(first: Any, second: Any) -> int:
    """A grid axis of ``first * second`` instances; the order of cores has no effect here."""
    return builtins.int(first) * builtins.int(second)


for _name in ("abs", "logical_not", "floor", "ceil", "trunc", "cos", "tan", "var", "all"):
    named("logical_and" if _name == "all" else _name, globals()[_name])
