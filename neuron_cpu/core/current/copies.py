"""``nki.isa``: copies, fills, predicated copies, shuffles and gathers."""

from typing import Any

import numpy as np

from ..device.errors import refuse, warn
from ..device.release import nki_since
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
    isa,
    operator,
    put,
    reduce_cmd,
    same_types,
)


@isa(copies.TENSOR_COPY, former={"dtype": None})
def tensor_copy(dst: View, src: View, engine: engine = engine.unknown) -> NkiInstruction:
    """``dst = src`` within SBUF and PSUM: bit-exact between equal types, else through fp32.

    VectorE, GpSimdE (SBUF only), and from gen3 on ScalarE. One side may have a run-time offset.
    """
    choice = choose(engine, "tensor_copy", copies.TENSOR_COPY.engines)
    if choice is Engine.SCALAR and CORE.number < 3:
        raise refuse(
            "sim_newer_core",
            "tensor_copy on ScalarE is unsupported on gen2, expected another engine; use "
            "nisa.activation(op=nl.copy)",
        )
    op = copies.TENSOR_COPY
    if dst.by_data is not None or src.by_data is not None:
        op = copies.DYNAMIC_DST if dst.by_data is not None else copies.DYNAMIC_SRC
    dst, src = alike("tensor_copy", dst, src)
    attrs = copies.copy_attrs(dst.dt, src.dt, choice)
    if choice is Engine.SCALAR:  # from gen3 on it moves bits as VectorE does
        attrs = Attrs(engine=choice, raw=dst.dt is src.dt)
    return put(op, (dst,), (src,), attrs)


@isa(copies.MEMSET)
def memset(dst: View, value: Any, engine: engine = engine.unknown) -> NkiInstruction:
    """Every element of ``dst`` becomes ``value``, an integer for integer types."""
    return fill(dst, value, engine, nki_since("2.29"))  # release notes of NKI 0.3.0


def fill(dst: View, value: Any, engine: Any = engine.unknown, strict: bool = False) -> Any:
    """`memset`; unless ``strict`` a float that is whole serves integer types, too."""
    constant = number(value)
    real(constant, "memset value")
    if dst.dt.is_int and isinstance(constant, float):
        if strict or not constant.is_integer():
            raise refuse(
                "sim_fill_type",
                f"memset of {dst.label()} with {constant}, expected an integer for an integer "
                f"type; write value={constant:.0f}",
            )
        constant = int(constant)
    choice = choose(engine, "memset", copies.MEMSET.engines)
    if dst.storage.buffer == "psum" and dst.dt.is_float and dst.dt.itemsize == 2:
        warn(
            "sim_psum_fill",
            f"memset of {dst.label()}, expected 4 bytes an element in PSUM; leave the "
            "fill out where a transpose writes the whole tile, and sum in float32",
        )
    return put(copies.MEMSET, (dst,), (), copies.FillAttrs(engine=choice, value=constant))


@isa(copies.COPY_PREDICATED)
def tensor_copy_predicated(
    dst: View, src: Any, predicate: View, reverse_pred: bool = False
) -> NkiInstruction:
    """``dst`` becomes ``src`` (a tile or a number) where ``predicate`` (uint8/16/32) is nonzero."""
    what = "tensor_copy_predicated"
    if predicate.dt.kind != "u":
        raise refuse(
            "sim_predicated_types",
            f"{what} with predicate {predicate.label()}, expected uint8, uint16 or uint32; write a "
            "comparison into a tile of nl.uint8",
        )
    if isinstance(src, View):
        dst, src, predicate = alike(what, dst, src, predicate)
        same_types(what, dst, src)
        attrs = copies.SelectAttrs(raw=True, reverse=flag(reverse_pred, "reverse_pred"))
        return put(copies.COPY_PREDICATED, (dst,), (predicate, src, dst), attrs)
    # where the predicate does not choose, what is there stays
    dst, predicate = alike(what, dst, predicate)
    constant = number(src)
    real(constant, f"{what} src")
    attrs = copies.SelectAttrs(on_false=constant, reverse=not reverse_pred)
    return put(copies.SELECT_REDUCE, (dst,), (predicate, dst), attrs)


@isa(copies.SELECT_REDUCE)
def select_reduce(
    dst: View,
    predicate: View,
    on_true: View,
    on_false: Any,
    reduce_res: Any = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_op: Any = None,
    reverse_pred: bool = False,
) -> NkiInstruction:
    """``dst`` = ``on_true`` where ``predicate`` else ``on_false`` (a number or (P, 1) fp32).

    The commands keep the maximum of each partition; ``reduce_op`` is nl.maximum.
    """
    what = "select_reduce"
    dst, predicate, on_true = alike(what, dst, predicate, on_true)
    if reduce_op is not None and operator(reduce_op, what) != "maximum":
        raise refuse(
            "sim_reduce_operator",
            f"{what} with reduce_op {reduce_op!r}, expected nl.maximum; "
            "reduce by others with nisa.tensor_reduce afterwards",
        )
    src = [predicate, on_true]
    constant = None
    if isinstance(on_false, View):
        src.append(column(on_false, on_true, f"{what} on_false"))
    else:
        constant = real(on_false, f"{what} on_false")
    attrs = copies.SelectAttrs(on_false=constant, reverse=flag(reverse_pred, "reverse_pred"))
    how = Reduction(VECTOR, "maximum", on_true.shape[0], what)
    return reducing(how, reduce_cmd, reduce_res, copies.SELECT_REDUCE, dst, tuple(src), attrs)


@isa(copies.STREAM_SHUFFLE)
def nc_stream_shuffle(dst: View, src: View, shuffle_mask: Any) -> NkiInstruction:
    """In each quadrant of 32 partitions, partition i of ``dst`` = ``shuffle_mask[i]`` of ``src``.

    255 leaves a partition of ``dst`` as it is. Partition counts may differ: the larger one, rounded
    up to a multiple of 32, is how many are active (aws-neuron-sdk, nki.isa.nc_stream_shuffle).
    """
    what = "nc_stream_shuffle"
    dst, src = alike(what, dst, src, partitions=False)
    same_types(what, dst, src)
    lanes = wholes(shuffle_mask, f"{what} mask")
    views, attrs = copies.shuffling(src, dst, lanes, raw=True, rounds=True)
    return put(copies.STREAM_SHUFFLE, (dst,), views, attrs)


@isa(gpsimd.LOCAL_GATHER)
def local_gather(
    dst: View,
    src_buffer: View,
    index: View,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
) -> NkiInstruction:
    """Each of 8 GpSimd cores reads its 16 partitions at the offsets of its 16 index rows.

    ``index`` uint16 of the same partitions, flattened partition-first; ``dst`` takes
    ``num_valid_indices`` times ``num_elem_per_idx`` elements per partition.
    """
    width, valid = whole(num_elem_per_idx, "local_gather num_elem_per_idx"), num_valid_indices
    if valid is not None:
        valid = whole(valid, "local_gather num_valid_indices")
    attrs = gpsimd.gathering(src_buffer, index, width, valid, dst)
    shaped = dst.reshape((dst.shape[0], attrs.count, width))
    return put(gpsimd.LOCAL_GATHER, (shaped,), (src_buffer, index), attrs)


@isa(gpsimd.GATHER)
def nc_n_gather(dst: View, data: View, indices: View) -> NkiInstruction:
    """``dst[p, j] = data[p].flatten()[indices[p, j]]``, indices uint32; GpSimdE."""
    if indices.dt.name != "uint32" or dst.dt is not data.dt:
        raise refuse(
            "sim_gather_index_type",
            f"nc_n_gather of {data.label()} with {indices.label()} into {dst.label()}, expected "
            "uint32 indices and a dst of data's type; "
            "copy them into tiles of these types with nisa.tensor_copy",
        )
    dst, indices = alike("nc_n_gather", dst, indices)
    attrs = gpsimd.GatherAttrs(free_axes=data.ndim - 1, index_axes=indices.ndim - 1)
    return put(gpsimd.GATHER, (dst,), (data, indices), attrs)


@isa(gpsimd.NONZERO)
def nonzero_with_count(
    dst: View, src: View, index_offset: int = 0, padding_val: int = -1
) -> NkiInstruction:
    """Places of nonzero elements in partitions 0, 16, ..., then padding, then their count; gen3."""
    what = "nonzero_with_count"
    if dst.shape[0] != src.shape[0] or dst.free_size != src.free_size + 1:
        raise refuse(
            "sim_nonzero",
            f"{what} of {src.label()} into {dst.label()}, expected {src.free_size + 1} "
            "elements per partition; make dst one column longer than src, for the count",
        )
    if src.dt.name not in ("float32", "int32") or dst.dt.name != "int32":
        raise refuse(
            "sim_nonzero",
            f"{what} of {src.label()} into {dst.label()}, expected fp32 or int32 into int32; make "
            "dst with dtype=nl.int32, and cast src with nisa.tensor_copy where it is another",
        )
    dst = dst.reshape((dst.shape[0], dst.free_size))
    mask = np.zeros(dst.shape, bool)
    mask[:: CORE.gpsimd_partitions] = True  # one partition of each GpSimd core works
    attrs = gpsimd.NonzeroAttrs(
        offset=whole(index_offset, f"{what} index_offset"),
        padding=whole(padding_val, f"{what} padding_val"),
        free_axes=src.ndim - 1,
        mask=mask,
    )
    return put(gpsimd.NONZERO, (dst,), (src,), attrs)
