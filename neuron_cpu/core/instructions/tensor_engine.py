"""TensorE: matrix products and transposes."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..device.dtypes import FLOAT32, to_dtype
from ..device.errors import refuse, warn
from ..device.spec import GEN2, Engine
from ..program import trace
from ..program.program import Instruction
from ..program.view import View
from .arguments import choose_engine, tile
from .copies import tensor_copy
from .entry import (
    FOUR_BYTE_FLOATS,
    MIN_II,
    ON_CHIP,
    PSUM,
    SBUF,
    check_free_size,
    define,
    wide_stride,
)


def _matmul(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    ns, nm = attrs.get("free_axes", (1, 1))
    stationary = xs[0].flatten(-ns) if ns > 1 else xs[0]
    moving = xs[1].flatten(-nm) if nm > 1 else xs[1]
    return torch.matmul(stationary.transpose(-1, -2), moving)


def _matmul_rules(i: Instruction) -> None:
    stationary, moving = i.src
    limit = GEN2.stationary_free_max
    check_free_size("nc_matmul stationary", stationary, stationary.free_size, limit)
    check_free_size("nc_matmul moving", moving, moving.free_size, GEN2.moving_free_max)
    if stationary.shape[0] != moving.shape[0]:
        raise refuse(
            "err_num_partition_mismatch",
            f"nc_matmul contracts {stationary.label()} with {moving.label()}, expected equal "
            f"partition counts, got {stationary.shape[0]} and {moving.shape[0]}; slice both to the "
            "same contraction rows",
        )
    wide = [v.dt.name in FOUR_BYTE_FLOATS for v in i.src]
    if wide[0] != wide[1]:
        raise refuse(
            "sim_matmul_mixed_types",
            f"nc_matmul mixes {stationary.dt} with {moving.dt}, expected both of 4 bytes or both "
            "narrower; cast one operand",
        )
    for view in i.src:
        if not view.dt.is_float:
            raise refuse(
                "sim_matmul_type",
                f"nc_matmul got {view.label()}, expected a floating-point type; cast it first",
            )
    out = i.dst[0]
    if not i.attrs.get("is_transpose") and out.dt.name != "float32":
        raise refuse(
            "sim_matmul_output_type",
            f"nc_matmul writes {out.label()}, expected float32: PSUM accumulates in fp32; cast "
            "while copying to SBUF",
        )


def _matmul_cycles(i: Instruction) -> float:
    stationary, moving = i.src
    n_stationary = stationary.free_size
    load = math.ceil(n_stationary / 4)  # LoadStationary runs up to 4 times faster (arch guide)
    load *= 2 if wide_stride(stationary) else 1
    stream = moving.free_size * (2 if wide_stride(moving) else 1)
    rate = 4 if stationary.dt.name in FOUR_BYTE_FLOATS else 1
    if rate == 4 and (i.attrs.get("stationary_onezero") or i.attrs.get("moving_onezero")):
        rate = 2
    return rate * max(load, MIN_II, stream)


NC_MATMUL = define(
    "nc_matmul", engine=Engine.TENSOR, reads=(SBUF,), writes=(PSUM,), flow="matmul",
    compute=_matmul, cycles=_matmul_cycles, rules=_matmul_rules, same_partitions=False,
    note="out[M, N] = stationary[K, M].T @ moving[K, N], accumulated in fp32 in PSUM",
)  # fmt: skip


def collapsed(view: View, what: str) -> tuple[View, int]:
    """The view with one free axis where strides allow it, and its number of free axes."""
    if view.ndim == 2 or view.paxis:
        return view, 1
    flat = view.flattened()
    return (view, view.ndim - 1) if flat is None else (flat, 1)


def _in_sbuf(operand: View) -> View:
    """The operand, a transpose that was assigned nowhere copied out of PSUM first."""
    producer = operand.storage.producer
    if operand.storage.buffer != "psum" or producer is None:
        return operand
    if producer.op is not NC_TRANSPOSE:
        return operand
    warn(
        "sim_transposed_operand",
        f"nc_matmul takes {operand.label()}, which nc_transpose made: TensorE reads SBUF only, the "
        "compiler adds a copy; assign the transpose to a tile in sbuf, or copy it explicitly",
    )
    return tensor_copy(operand)


def nc_matmul(
    stationary: Any,
    moving: Any,
    *,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    mask: Any = None,
    **extra: Any,
) -> View:
    """``stationary[K, M].T @ moving[K, N]`` on TensorE -> [M, N] fp32 @ PSUM.

    K <= 128 partitions, M <= 128, N <= 512; both operands in SBUF. ``acc[...] += nc_matmul(...)``
    on a PSUM tile from nl.zeros accumulates in fp32 inside PSUM.
    """
    left, ns = collapsed(_in_sbuf(tile(stationary, "nc_matmul")), "stationary")
    right, nm = collapsed(_in_sbuf(tile(moving, "nc_matmul")), "moving")
    attrs: dict[str, Any] = {}
    if (ns, nm) != (1, 1):
        attrs["free_axes"] = (ns, nm)
    if is_transpose:
        attrs["is_transpose"] = True
    if is_stationary_onezero:
        attrs["stationary_onezero"] = True
    if is_moving_onezero:
        attrs["moving_onezero"] = True
    for name in extra:
        if name not in ("tile_position", "tile_size"):
            raise refuse(
                "sim_unknown_keyword",
                f"nc_matmul got keyword '{name}', which NeuronCore-v2 does not have; drop it",
            )
        warn("sim_newer_api", f"nc_matmul({name}=) needs SDK 2.22 or newer; drop it to run on 2.21")
    tracer = trace.current("nisa.nc_matmul")
    shape = (left.free_size, right.free_size)
    dt = right.dt if is_transpose and right.dt is left.dt else FLOAT32
    if mask is None:
        fresh = tracer.storage(shape, dt, "psum")
        out = tracer.whole(fresh)
        fresh.producer = tracer.emit(NC_MATMUL, (out,), (left, right), attrs)
        return out
    return _masked_matmul(tracer, left, right, shape, dt, attrs, mask)


def _masked_matmul(tracer, left, right, shape, dt, attrs, mask):
    """A mask on the [M, N] result cuts the operands' free axes."""
    fresh = tracer.storage(shape, dt, "psum")
    out = tracer.whole(fresh)
    cut = trace.region(mask, shape)
    if cut is trace.EMPTY:
        return out
    if isinstance(cut, tuple) and left.ndim == right.ndim == 2:
        rows = slice(0, left.shape[0])
        left, right = left.slice_box((rows, cut[0])), right.slice_box((rows, cut[1]))
        out_cut = out.slice_box(cut)
    elif cut is None:
        out_cut = out
    else:
        raise refuse(
            "sim_matmul_mask",
            "mask of nc_matmul is no box of the result [M, N], expected one bound per axis; mask "
            "the operands in their subscripts instead",
        )
    fresh.producer = tracer.emit(NC_MATMUL, (out_cut,), (left, right), attrs)
    return out


def _transpose(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    free = attrs.get("free_axes", 1)
    flat = xs[0].flatten(-free) if free > 1 else xs[0]
    return flat.transpose(-1, -2)


def _transpose_rules(i: Instruction) -> None:
    data = i.src[0]
    on_vector = i.attrs.get("engine") is Engine.VECTOR
    limit = GEN2.vector_transpose_max if on_vector else GEN2.partitions
    for size in (data.shape[0], data.free_size):
        if size > limit:
            raise refuse(
                "err_size_of_dimension_exceed_arch_limit",
                f"nc_transpose of {data.label()} has an axis of {size}, expected at most {limit} "
                "on this engine; transpose in blocks",
            )
    memories = ON_CHIP if on_vector else (SBUF,)
    if data.storage.buffer not in memories:
        raise refuse(
            "err_unsupported_memory",
            f"nc_transpose on TensorE got {data.label()}, expected sbuf; copy it to SBUF first",
        )
    if not on_vector and i.dst[0].storage.buffer != PSUM:
        raise refuse(
            "err_unsupported_memory",
            f"nc_transpose on TensorE writes {i.dst[0].label()}, expected psum; assign the result "
            "to a PSUM tile and copy it",
        )


def _transpose_cycles(i: Instruction) -> float:
    data = i.src[0]
    if i.attrs.get("engine") is Engine.VECTOR:
        return max(MIN_II, data.free_size)
    rate = 4 if data.dt.name in FOUR_BYTE_FLOATS else 1
    return rate * max(data.shape[0], min(64, data.free_size), MIN_II)


NC_TRANSPOSE = define(
    "nc_transpose", engine=Engine.TENSOR, reads=ON_CHIP, writes=ON_CHIP, flow="transpose",
    compute=_transpose, cycles=_transpose_cycles, rules=_transpose_rules, same_partitions=False,
    note="TensorE: 128 x 128, SBUF to PSUM, finite values only; VectorE: 32 x 32",
)  # fmt: skip


def nc_transpose(data: Any, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> View:
    """[P, F...] -> [F, P], free axes collapsed. TensorE up to 128 x 128, VectorE up to 32 x 32.

    TensorE (default above 32 x 32): SBUF -> PSUM, finite values only.
    """
    source, free = collapsed(tile(data, "nc_transpose"), "data")
    choice = choose_engine(engine, "nc_transpose", (Engine.TENSOR, Engine.VECTOR))
    on_vector = choice is Engine.VECTOR
    attrs: dict[str, Any] = {"engine": choice} if choice else {}
    if free != 1:
        attrs["free_axes"] = free
    dt = source.dt if dtype is None else to_dtype(dtype)
    if dt is source.dt:
        attrs["raw"] = True
    tracer = trace.current("nisa.nc_transpose")
    if tracer.program.direct_allocation and not on_vector:
        raise refuse(
            "err_transpose_on_tensor_engine_not_allowed_in_allocated_kernel",
            f"nc_transpose of {source.label()} on TensorE needs a hidden identity tensor, expected "
            "engine=nisa.vector_engine under direct allocation; multiply by an identity tile of "
            "your own with nc_matmul(is_transpose=True)",
        )
    buffer = "sbuf" if on_vector else "psum"
    fresh = tracer.storage((source.free_size, source.shape[0]), dt, buffer)
    out = tracer.whole(fresh)
    dst = out
    cut = trace.region(mask, source.shape) if mask is not None else None
    if cut is trace.EMPTY:
        return out
    if isinstance(cut, tuple):
        source, dst = source.slice_box(cut), out.slice_box((cut[1], cut[0]))
    fresh.producer = tracer.emit(NC_TRANSPOSE, (dst,), (source,), attrs)
    return out
