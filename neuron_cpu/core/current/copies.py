"""``nki.isa``: copies, fills, predicated copies, shuffles and gathers."""

from typing import Any

import numpy as np

from ..device.errors import refuse, warn
from ..device.spec import CORE, Engine
from ..instructions import copies, gpsimd
from ..instructions.arguments import column, flag, number, real, whole, wholes
from ..program.attributes import Attrs
from ..program.view import View
from .accumulators import VECTOR, Reduction, reducing
from .operands import (
    NkiInstruction,
    alike,
    choose,
    engine,
    operator,
    put,
    reduce_cmd,
    same_types,
    tensor,
)
from .releases import isa


@isa(copies.TENSOR_COPY, former={"dtype": None})
def tensor_copy(
    dst: Any, src: Any, engine: engine = engine.unknown, name: str | None = None
) -> NkiInstruction:
    """``dst = src`` within SBUF and PSUM: bit-exact between equal types, else through fp32.

    VectorE, GpSimdE (SBUF only), and from gen3 on ScalarE. One side may have a run-time offset.
    """
    target, data = tensor(dst, "tensor_copy"), tensor(src, "tensor_copy")
    choice = choose(engine, "tensor_copy", copies.TENSOR_COPY.engines)
    if choice is Engine.SCALAR and CORE.number < 3:
        raise refuse(
            "sim_newer_core",
            "tensor_copy on ScalarE is unsupported on gen2, expected another engine; use "
            "nisa.activation(op=nl.copy)",
        )
    op = copies.TENSOR_COPY
    if target.by_data is not None or data.by_data is not None:
        op = copies.DYNAMIC_DST if target.by_data is not None else copies.DYNAMIC_SRC
    target, data = alike("tensor_copy", target, data)
    attrs = copies.copy_attrs(target.dt, data.dt, choice)
    if choice is Engine.SCALAR:  # from gen3 on it moves bits as VectorE does
        attrs = Attrs(engine=choice, raw=target.dt is data.dt)
    return put(op, (target,), (data,), attrs, name)


@isa(copies.MEMSET)
def memset(
    dst: Any, value: Any, engine: engine = engine.unknown, name: str | None = None
) -> NkiInstruction:
    """Every element of ``dst`` becomes ``value``, an integer for integer types."""
    target = tensor(dst, "memset")
    constant = number(value)
    real(constant, "memset value")
    if target.dt.is_int and isinstance(constant, float):
        if not constant.is_integer():
            raise refuse(
                "sim_fill_type",
                f"memset of {target.label()} with {constant}, expected an integer for an integer "
                "type; write an int literal",
            )
        constant = int(constant)
    choice = choose(engine, "memset", copies.MEMSET.engines)
    if target.storage.buffer == "psum" and target.dt.is_float and target.dt.itemsize == 2:
        warn(
            "sim_psum_fill",
            f"memset of {target.label()}, expected 4 bytes an element in PSUM; leave the "
            "fill out where a transpose writes the whole tile, and sum in float32",
        )
    return put(copies.MEMSET, (target,), (), copies.FillAttrs(engine=choice, value=constant), name)


@isa(copies.COPY_PREDICATED)
def tensor_copy_predicated(
    dst: Any, src: Any, predicate: Any, reverse_pred: bool = False, name: str | None = None
) -> NkiInstruction:
    """``dst`` becomes ``src`` (a tile or a number) where ``predicate`` (uint8/16/32) is nonzero."""
    what = "tensor_copy_predicated"
    target, choice = tensor(dst, what), tensor(predicate, what)
    if choice.dt.kind != "u":
        raise refuse(
            "sim_predicated_types",
            f"{what} with predicate {choice.label()}, expected uint8, uint16 or uint32; write a "
            "comparison into a tile of nl.uint8",
        )
    if isinstance(src, View):
        target, data, choice = alike(what, target, src, choice)
        same_types(what, target, data)
        attrs = copies.SelectAttrs(raw=True, reverse=flag(reverse_pred, "reverse_pred"))
        return put(copies.COPY_PREDICATED, (target,), (choice, data, target), attrs, name)
    # where the predicate does not choose, what is there stays
    target, choice = alike(what, target, choice)
    constant = number(src)
    real(constant, f"{what} src")
    attrs = copies.SelectAttrs(on_false=constant, reverse=not reverse_pred)
    return put(copies.SELECT_REDUCE, (target,), (choice, target), attrs, name)


@isa(copies.SELECT_REDUCE)
def select_reduce(
    dst: Any,
    predicate: Any,
    on_true: Any,
    on_false: Any,
    reduce_res: Any = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_op: Any = None,
    reverse_pred: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """``dst`` = ``on_true`` where ``predicate`` else ``on_false`` (a number or (P, 1) fp32).

    The commands keep the maximum of each partition; ``reduce_op`` is nl.maximum.
    """
    what = "select_reduce"
    target, choice, data = alike(
        what, tensor(dst, what), tensor(predicate, what), tensor(on_true, what)
    )
    if reduce_op is not None and operator(reduce_op, what) != "maximum":
        raise refuse(
            "sim_reduce_operator",
            f"{what} with reduce_op {reduce_op!r}, expected nl.maximum; "
            "reduce by others with nisa.tensor_reduce afterwards",
        )
    src = [choice, data]
    constant = None
    if isinstance(on_false, View):
        src.append(column(on_false, data, f"{what} on_false"))
    else:
        constant = real(on_false, f"{what} on_false")
    attrs = copies.SelectAttrs(on_false=constant, reverse=flag(reverse_pred, "reverse_pred"))
    how = Reduction(VECTOR, "maximum", data.shape[0], what)
    return reducing(
        how, reduce_cmd, reduce_res, copies.SELECT_REDUCE, target, tuple(src), attrs, name
    )


@isa(copies.STREAM_SHUFFLE)
def nc_stream_shuffle(
    dst: Any, src: Any, shuffle_mask: Any, name: str | None = None
) -> NkiInstruction:
    """In each quadrant of 32 partitions, partition i of ``dst`` = ``shuffle_mask[i]`` of ``src``.

    255 leaves a partition of ``dst`` as it is. Partition counts may differ: the larger one, rounded
    up to a multiple of 32, is how many are active (aws-neuron-sdk, nki.isa.nc_stream_shuffle).
    """
    what = "nc_stream_shuffle"
    target, data = alike(what, tensor(dst, what), tensor(src, what), partitions=False)
    same_types(what, target, data)
    lanes = wholes(shuffle_mask, f"{what} mask")
    views, attrs = copies.shuffling(data, target, lanes, raw=True, rounds=True)
    return put(copies.STREAM_SHUFFLE, (target,), views, attrs, name)


@isa(gpsimd.LOCAL_GATHER)
def local_gather(
    dst: Any,
    src_buffer: Any,
    index: Any,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Each of 8 GpSimd cores reads its 16 partitions at the offsets of its 16 index rows.

    ``index`` uint16 of the same partitions, flattened partition-first; ``dst`` takes
    ``num_valid_indices`` times ``num_elem_per_idx`` elements per partition.
    """
    data, offsets, target = (tensor(v, "local_gather") for v in (src_buffer, index, dst))
    width, valid = whole(num_elem_per_idx, "local_gather num_elem_per_idx"), num_valid_indices
    if valid is not None:
        valid = whole(valid, "local_gather num_valid_indices")
    attrs = gpsimd.gathering(data, offsets, width, valid, target)
    shaped = target.reshape((target.shape[0], attrs.count, width))
    return put(gpsimd.LOCAL_GATHER, (shaped,), (data, offsets), attrs, name)


@isa(gpsimd.GATHER)
def nc_n_gather(dst: Any, data: Any, indices: Any, name: str | None = None) -> NkiInstruction:
    """``dst[p, j] = data[p].flatten()[indices[p, j]]``, indices uint32; GpSimdE."""
    source, index, target = (tensor(v, "nc_n_gather") for v in (data, indices, dst))
    if index.dt.name != "uint32" or target.dt is not source.dt:
        raise refuse(
            "sim_gather_index_type",
            f"nc_n_gather of {source.label()} with {index.label()} into {target.label()}, expected "
            "uint32 indices and a dst of data's type; "
            "copy them into tiles of these types with nisa.tensor_copy",
        )
    target, index = alike("nc_n_gather", target, index)
    attrs = gpsimd.GatherAttrs(free_axes=source.ndim - 1, index_axes=index.ndim - 1)
    return put(gpsimd.GATHER, (target,), (source, index), attrs, name)


@isa(gpsimd.NONZERO)
def nonzero_with_count(
    dst: Any, src: Any, index_offset: int = 0, padding_val: int = -1, name: str | None = None
) -> NkiInstruction:
    """Places of nonzero elements in partitions 0, 16, ..., then padding, then their count; gen3."""
    what = "nonzero_with_count"
    target, data = tensor(dst, what), tensor(src, what)
    if target.shape[0] != data.shape[0] or target.free_size != data.free_size + 1:
        raise refuse(
            "sim_nonzero",
            f"{what} of {data.label()} into {target.label()}, expected {data.free_size + 1} "
            "elements per partition; make dst one column longer than data, for the count",
        )
    if data.dt.name not in ("float32", "int32") or target.dt.name != "int32":
        raise refuse(
            "sim_nonzero",
            f"{what} of {data.label()} into {target.label()}, expected fp32 or int32 into int32; "
            "cast data with nisa.tensor_copy",
        )
    target = target.reshape((target.shape[0], target.free_size))
    mask = np.zeros(target.shape, bool)
    mask[:: CORE.gpsimd_partitions] = True  # one partition of each GpSimd core works
    attrs = gpsimd.NonzeroAttrs(
        offset=whole(index_offset, f"{what} index_offset"),
        padding=whole(padding_val, f"{what} padding_val"),
        free_axes=data.ndim - 1,
        mask=mask,
    )
    return put(gpsimd.NONZERO, (target,), (data,), attrs, name)
