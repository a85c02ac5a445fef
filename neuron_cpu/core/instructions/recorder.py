"""Recording of an instruction with a mask, into a fresh tile or a given destination."""

from __future__ import annotations

from typing import Any

from ..device.dtypes import DType
from ..device.errors import refuse
from ..device.spec import Engine
from ..program import trace
from ..program.view import View
from . import operators
from .arguments import no_box, tile
from .entry import SBUF, OpSpec


def record_fresh(
    op: OpSpec,
    shape: tuple[int, ...],
    dt: DType,
    src: tuple[View, ...],
    attrs: dict,
    mask: Any = None,
    axes: tuple[int | None, ...] = (),
) -> View:
    """Record ``op`` into a fresh SBUF tile whose shape differs from its operands'.

    A mask over ``src[0]`` cuts it, the rows of the others, and those axes of the result that
    ``axes`` says are axes of ``src[0]``.
    """
    tracer = trace.current(f"nisa.{op.name}")
    made = tracer.storage(shape, dt, SBUF)
    out = dst = tracer.whole(made)
    cut = trace.region(mask, src[0].shape) if mask is not None else None
    if cut is trace.EMPTY:
        return out
    if isinstance(cut, tuple):
        box = [slice(0, n) if a is None else cut[a] for a, n in zip(axes, shape)]
        dst = out.slice_box(tuple(box))
        rest = [s.slice_box((cut[0], *(slice(0, n) for n in s.shape[1:]))) for s in src[1:]]
        src = (src[0].slice_box(cut), *rest)
    elif cut is not None:
        raise no_box(op.name, src[0])
    made.producer = tracer.emit(op, (dst,), src, attrs)
    return out


def record_into(
    op: OpSpec, dst: View, src: tuple[View, ...], attrs: dict[str, Any], mask: Any = None
) -> None:
    """Record ``op`` with a result passed by reference; all operands have the result's shape."""
    cut = trace.region(mask, dst.shape) if mask is not None else None
    if cut is trace.EMPTY:
        return
    if isinstance(cut, tuple):
        dst, src = dst.slice_box(cut), tuple(s.slice_box(cut) for s in src)
    elif cut is not None:
        attrs = {**attrs, "mask": cut}
    trace.current(f"nisa.{op.name}").emit(op, (dst,), src, attrs)
    note_written(dst)


def with_reduction(tracer, op, data, src, attrs, dt, reduce_op, reduce_res, mask):
    """Record an instruction with a second result: a reduction over all free axes."""
    total = tile(reduce_res, f"{op.name} reduce_res")
    if total.shape[0] != data.shape[0] or total.free_size != 1:
        raise refuse(
            "sim_reduce_res_shape",
            f"{op.name} reduce_res {total.label()}, expected shape ({data.shape[0]}, 1)",
        )
    name = operators.name_of(reduce_op) if reduce_op is not None else "add"
    if op.engine is Engine.SCALAR and name != "add":
        raise refuse(
            "sim_activation_reduce_op",
            f"activation_reduce with reduce_op '{name}', expected add on NeuronCore-v2; use "
            "nisa.tensor_reduce",
        )
    if op.engine is not Engine.SCALAR:
        attrs["reduce_op"] = name
    attrs["reduce_axes"] = data.ndim - 1
    attrs["reduce_pad"] = (1,) * (total.ndim - 1)
    fresh = tracer.storage(data.shape, dt, "sbuf")
    out = tracer.whole(fresh)
    dst = out
    cut = trace.region(mask, data.shape) if mask is not None else None
    if cut is trace.EMPTY:
        return out
    if isinstance(cut, tuple):
        dst = out.slice_box(cut)
        src = [s.slice_box(cut) for s in src]
        total = total.slice_box((cut[0], *(slice(0, s) for s in total.shape[1:])))
    elif cut is not None:
        raise refuse(
            "sim_reduce_mask",
            f"mask of {op.name} is no box, expected one bound per axis; mask whole rows or columns",
        )
    fresh.producer = tracer.emit(op, (dst, total), tuple(src), attrs)
    return out


def note_written(dst: View) -> None:
    """A write covers part of a PSUM tile that matmuls may accumulate into."""
    if dst.storage.groups is not None:
        dst.storage.groups.written(dst)
