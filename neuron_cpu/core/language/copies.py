"""``nki.isa``: copies, fills, selections, searches, gathers, shuffles, random numbers and DMA.

Sources: aws-neuron-sdk v2.21.1 to v2.26.1, general/nki/api/nki/isa/__init__.py. Using a function
that came after 2.21 is a warning, because the kernel does not compile on 2.21.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ..device.dtypes import UINT32, Shape, to_dtype
from ..device.errors import refuse, warn
from ..device.spec import CORE
from ..instructions.arguments import common_part, fp32, number, real, stretched, wholes
from ..instructions.arguments import dge_mode as descriptor_modes
from ..instructions.arguments import oob_mode as bound_modes
from ..instructions.arguments import reduce_cmd as commands
from ..instructions.copies import (
    COPY_PREDICATED,
    DMA_COPY,
    DMA_TRANSPOSE,
    DYNAMIC_DST,
    DYNAMIC_SRC,
    FIND8,
    MAX8,
    MEMSET,
    REPLACE8,
    SELECT_REDUCE,
    STREAM_SHUFFLE,
    TENSOR_COPY,
    FillAttrs,
    PermuteAttrs,
    SearchAttrs,
    SelectAttrs,
    copy_attrs,
    shuffling,
    transposed_axes,
)
from ..instructions.entry import PSUM, SBUF
from ..instructions.gpsimd import (
    AFFINE_SELECT,
    DROPOUT,
    GATHER,
    IOTA,
    LOCAL_GATHER,
    RAND,
    SEQUENCE_BOUNDS,
    DropoutAttrs,
    GatherAttrs,
    IotaAttrs,
    KeepAttrs,
    gathering,
    random_source,
    with_probability,
)
from ..instructions.recorder import ALIKE, ROWS, WHOLE, record
from ..instructions.vector import RANGE_SELECT, ranging
from ..program import regions, trace
from ..program.attributes import Attrs
from ..program.index import Index, Mask, affine, is_integer
from ..program.program import Instruction
from ..program.storage import Storage
from ..program.view import View, compose
from .operands import (
    choose_engine,
    fresh,
    isa,
    name_of,
    newer,
    reduction_target,
    result_type,
    rows_only,
    same_shape,
    tile,
)


@isa(IOTA)
def iota(expr: Any, dtype: Any, *, mask: Any = None) -> View:
    """Tile with the values of an affine index expression (int32 inside, then cast); GpSimdE."""
    if is_integer(expr):  # a loop variable or program_id: one number
        expr = affine(int(expr), (0, 0), (1, 1))
    if not isinstance(expr, Index) or expr.ndim < 2:
        raise refuse(
            "sim_iota_expression",
            f"iota got {expr!r}, expected a loop variable or an index expression of at least two "
            "axes such as nl.arange(n)[None, :]; write nisa.iota(nl.arange(n)[None, :], nl.int32)",
        )
    return fresh(IOTA, (), IotaAttrs(values=expr.values()), to_dtype(dtype), mask, expr.shape)


@isa(AFFINE_SELECT)
def affine_select(
    pred: Any, on_true_tile: View, on_false_value: Any, *, mask: Any = None, dtype: Any = None
) -> View:
    """Keep elements where one affine comparison holds, else ``on_false_value``. GpSimdE, SBUF."""
    if not isinstance(pred, Mask) or len(pred.terms) != 1:
        raise refuse(
            "sim_affine_select_predicate",
            "affine_select predicate is not one affine comparison, expected e.g. i_q >= i_k; "
            "compare indices of nl.arange, in two affine_selects for a conjunction",
        )
    keep = np.broadcast_to(pred.evaluate(on_true_tile.shape), on_true_tile.shape)
    if on_true_tile.storage.buffer == PSUM:
        warn(
            "sim_gpsimd_psum",
            f"affine_select reads {on_true_tile.label()}: GpSimdE has no PSUM port, the compiler "
            "adds a copy to SBUF; copy it explicitly",
        )
        on_true_tile = tensor_copy(on_true_tile)
    attrs = KeepAttrs(keep=keep, on_false=real(on_false_value, "affine_select on_false_value"))
    return fresh(AFFINE_SELECT, (on_true_tile,), attrs, dtype, mask)


@isa(LOCAL_GATHER)
def local_gather(
    src_buffer: View,
    index: View,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    *,
    mask: Any = None,
) -> View:
    """Gather along the free axis: [P, F...] and uint16 [P, n] -> [P, n, 16, num_elem_per_idx].

    Fewer than all valid indices make it [P, num_valid_indices, num_elem_per_idx].

    The indices of each 16 partitions, read partition first, serve all 16; P is a multiple of 16.
    Indices are element offsets, already multiplied by ``num_elem_per_idx``.
    """
    (data,) = rows_only("local_gather", mask, src_buffer)
    attrs = gathering(data, index, num_elem_per_idx, num_valid_indices)
    count, width = attrs.count, attrs.width
    found = fresh(LOCAL_GATHER, (data, index), attrs, shape=(data.shape[0], count, width))
    whole = (*index.shape, CORE.gpsimd_partitions, width)  # as AWS's test of the call has it
    return found.reshape(whole) if count == CORE.gpsimd_partitions * index.free_size else found


def gather_flattened(data: View, indices: View, *, mask: Any = None, dtype: Any = None) -> View:
    """``data`` [P, F...] read at ``indices`` (unsigned, [P, N...]) of its flattened free axes."""
    newer("gather_flattened", "2.24")
    if indices.dt is not UINT32:
        raise refuse(
            "sim_gather_index_type",
            f"gather_flattened indices {indices.label()}, expected uint32; cast them",
        )
    attrs = GatherAttrs(free_axes=data.ndim - 1, index_axes=indices.ndim - 1)
    return fresh(GATHER, (data, indices), attrs, dtype, mask, indices.shape, (ROWS, ALIKE, ROWS))


@isa(SEQUENCE_BOUNDS, came="2.26")
def sequence_bounds(*, segment_ids: View, dtype: Any = None) -> View:
    """Segment ids [1, n] -> [1, 2, n]: first index and end (exclusive) of each element's segment.

    Id 0 is padding: start n, end -1 (SDK 2.26). Types fp32 or int32.
    """
    rows = segment_ids.shape[0] if segment_ids.ndim == 2 else 0
    if rows != 1 or segment_ids.dt.name not in ("float32", "int32"):
        raise refuse(
            "sim_sequence_bounds",
            f"sequence_bounds got {segment_ids.label()}, expected fp32 or int32 of shape (1, n); "
            "reshape",
        )
    shape = (1, 2, segment_ids.shape[1])
    return fresh(SEQUENCE_BOUNDS, (segment_ids,), Attrs(), dtype, shape=shape)


def rand(shape: Any, dtype: Any = np.float32) -> View:
    """Tile of uniform numbers in [0, 1); the same in every run, new ones in every call."""
    trace.current("nl.rand")
    size = tuple(int(s) for s in shape)
    src: list[View] = []
    attrs = random_source(src, shape=size)
    return fresh(RAND, tuple(src), attrs, to_dtype(dtype), shape=size)


def random_seed(seed: Any, *, mask: Any = None) -> None:
    """Seed of the random instructions that follow: a number or a (1, 1) integer tile."""
    tracer = trace.current("nl.random_seed")
    if regions.region(mask, (1, 1)) is regions.EMPTY:
        return
    if isinstance(seed, View):
        tracer.random = (seed.slice_box((slice(0, 1),) * 2), 0)
    elif is_integer(seed):
        tracer.random = (int(seed), 0)
    else:
        raise refuse(
            "sim_random_seed",
            f"random_seed got {type(seed).__name__}, expected an integer or an integer tile; "
            "write a number, 0",
        )


@isa(DROPOUT)
def dropout(data: View, prob: Any, *, mask: Any = None, dtype: Any = None) -> View:
    """``data`` with elements set to zero with probability ``prob`` (a number or [P, 1])."""
    src, probability, at = with_probability(data, prob, lambda: stretched(prob, data, "prob"))
    cuts = [ALIKE] * (1 + len(src))  # the result and the operands of its shape
    attrs = random_source(src, DropoutAttrs, probability=probability, probability_at=at)
    cuts += [WHOLE] * (1 + len(src) - len(cuts))  # a seed that is data stays whole
    return fresh(DROPOUT, tuple(src), attrs, dtype, mask, axes=cuts)


@isa(None)
def builtin_custom_op(*_: Any, **__: Any) -> View:
    """Calls a compiled GpSimdE program, whose format is not public."""
    raise NotImplementedError(
        "nki.isa.builtin_custom_op runs a compiled GpSimdE program, whose format is not public"
    )


def copy_into(dst: View, src: View) -> None:
    """Record ``dst <- src`` between on-chip tensors."""
    if not src.storage.on_chip:
        raise refuse(
            "err_unsupported_memory",
            f"{src.label()} is assigned to {dst.label()}, expected a tile in sbuf or psum; load "
            "it with nl.load first",
        )
    record(TENSOR_COPY, (dst,), (src,), copy_attrs(dst.dt, src.dt))


@isa(TENSOR_COPY)
def tensor_copy(src: View, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> View:
    """Copy a tile within SBUF/PSUM; bit-exact unless the type changes.

    ``src`` [P, F...] @ SBUF|PSUM of any type; result alike @ SBUF (PSUM if assigned there).
    """
    dt = result_type(dtype, src.dt)
    choice = choose_engine(engine, "tensor_copy", TENSOR_COPY.engines)
    return fresh(TENSOR_COPY, (src,), copy_attrs(dt, src.dt, choice), dt, mask)


def copy_written(source: View, dtype: Any) -> View:
    """SBUF copy of the part of ``source`` that its instruction wrote, which a mask may cut."""
    producer = source.storage.producer
    if producer is None:
        return source
    written = producer.dst[0]
    if written.shape == source.shape:
        return tensor_copy(source, dtype=dtype)
    tracer = trace.current("copy")
    dt = result_type(dtype, source.dt)
    out = tracer.whole(tracer.storage(source.shape, dt, SBUF))
    target = compose(written, out)
    assert target is not None  # a mask leaves a box
    out.storage.producer = record(TENSOR_COPY, (target,), (written,), copy_attrs(dt, source.dt))
    return out


def fill(dst: View, value: Any) -> None:
    """Record ``dst[...] = constant``."""
    record(MEMSET, (dst,), (), FillAttrs(value=number(value)))


def initial_fill(storage: Storage) -> Instruction:
    """The real memset of a tensor that is read before its first accumulation wrote it.

    Zeros of a PSUM tile from ``nl.zeros``, or the neutral element of a reduction over iterations.
    """
    whole = View.blocks_last(storage)
    value = FillAttrs(value=0 if storage.initial is None else storage.initial)
    return Instruction(MEMSET, (whole,), (), value, storage.frame, storage.source)


@isa(MEMSET)
def memset(shape: Any, value: Any, dtype: Any, *, mask: Any = None, engine: Any = None) -> View:
    """New tile of ``shape`` filled with ``value``; VectorE or GpSimdE."""
    attrs = FillAttrs(engine=choose_engine(engine, "memset", MEMSET.engines), value=number(value))
    return fresh(MEMSET, (), attrs, to_dtype(dtype), mask, tuple(int(s) for s in shape))


@isa(DYNAMIC_SRC)
def tensor_copy_dynamic_src(src: View, *, mask: Any = None, dtype: Any = None) -> View:
    """Copy whose source offset is data: ``t[i_p, offset[0, k] + i_f]`` @ SBUF|PSUM.

    ``offset`` is an integer tile in SBUF; the index must stay inside of its axis at run time.
    """
    dt = result_type(dtype, src.dt)
    return fresh(DYNAMIC_SRC, (src,), copy_attrs(dt, src.dt), dt, mask)


@isa(DYNAMIC_DST, came="2.22")
def tensor_copy_dynamic_dst(*, dst: View, src: View, mask: Any = None, dtype: Any = None) -> None:
    """Copy to a destination whose offset is data (SDK 2.22); ``dtype`` is dst's."""
    same_shape("tensor_copy_dynamic_dst", dst, src)
    record(DYNAMIC_DST, (dst,), (src,), copy_attrs(dst.dt, src.dt), mask)


@isa(COPY_PREDICATED, came="2.22")
def tensor_copy_predicated(
    *,
    src: Any,
    dst: View,
    predicate: View,
    mask: Any = None,
    dtype: Any = None,
    reverse_pred: bool = False,
) -> None:
    """``dst`` = ``src`` (a tile or a number) where ``predicate`` (uint8/16/32, or bool as the
    documentation's example has it) is nonzero, else unchanged (SDK 2.22)."""
    if isinstance(src, (int, float, np.number)):
        src = memset(dst.shape, src, dst.dtype)
    src = tile(src, "tensor_copy_predicated")
    same_shape("tensor_copy_predicated", dst, src, predicate)
    if src.dt is not dst.dt or not (predicate.dt.kind == "u" or predicate.dt.name == "bool_"):
        raise refuse(
            "sim_predicated_types",
            f"tensor_copy_predicated got src {src.dt}, dst {dst.dt}, predicate {predicate.dt}, "
            f"expected one type for src and dst and an unsigned predicate; write nl.copy(x, dtype="
            f"nl.{dst.dt}) for src, and nl.copy(x, dtype=nl.uint8) for the predicate",
        )
    attrs = SelectAttrs(raw=True, reverse=bool(reverse_pred))
    record(COPY_PREDICATED, (dst,), (predicate, src, dst), attrs, mask)


@isa(SELECT_REDUCE, came="2.26")
def select_reduce(
    *,
    dst: View,
    predicate: View,
    on_true: View,
    on_false: Any,
    reduce_res: Any = None,
    reduce_cmd: Any = commands.idle,
    reduce_op: Any = np.max,
    reverse_pred: bool = False,
    mask: Any = None,
    dtype: Any = None,
) -> None:
    """``dst`` = ``on_true`` where ``predicate`` else ``on_false`` (number or [P, 1]) (SDK 2.26).

    With ``reduce_cmd=reset_reduce``, ``reduce_res`` [P, 1] receives the maximum over the free axes.
    """
    same_shape("select_reduce", dst, on_true, predicate)
    choice, target, data = rows_only("select_reduce", mask, predicate, dst, on_true)
    src = [choice, data]
    constant = None
    if isinstance(on_false, View):
        src.append(stretched(on_false, data, "on_false"))
    else:
        constant = real(on_false, "select_reduce on_false")
    results: tuple[View, ...] = (target,)
    reduce_axes = 0
    if reduce_res is not None:
        resets = reduce_cmd is commands.reset_reduce
        if name_of(reduce_op) != "maximum" or not resets:
            raise refuse(
                "sim_select_reduce_command",
                f"select_reduce with {reduce_op} and {reduce_cmd}, expected np.max and "
                "reduce_cmd.reset_reduce on this core; reduce with nisa.tensor_reduce",
            )
        results = (target, reduction_target(reduce_res, data, "select_reduce"))
        reduce_axes = data.ndim - 1
    attrs = SelectAttrs(on_false=constant, reverse=bool(reverse_pred), reduce_axes=reduce_axes)
    record(SELECT_REDUCE, results, tuple(src), attrs)


@isa(RANGE_SELECT, came="2.23")
def range_select(
    *,
    on_true_tile: View,
    comp_op0: Any,
    comp_op1: Any,
    bound0: View,
    bound1: View,
    reduce_cmd: Any = commands.reset_reduce,
    reduce_res: Any = None,
    reduce_op: Any = np.max,
    range_start: float = 0,
    on_false_value: float = fp32.min,
    mask: Any = None,
    dtype: Any = None,
) -> View:
    """Keep columns whose number lies between two bounds [P, 1] of each partition (SDK 2.23).

    NeuronCore-v3 and newer. Columns count from ``range_start``; the others become the least fp32
    number. ``reduce_res`` [P, 1] receives the maximum over the free axes.
    """
    what = "range_select"
    (data,) = rows_only(what, mask, on_true_tile)
    bounds = [stretched(b, data, f"{what} bound") for b in (bound0, bound1)]
    if reduce_cmd is not commands.reset_reduce:
        raise refuse(
            "sim_reduce_registers",
            f"{what} with {reduce_cmd}, expected reduce_cmd.reset_reduce: maxima over several "
            "instructions are not simulated; reduce with nisa.tensor_reduce",
        )
    ops = name_of(comp_op0), name_of(comp_op1)
    attrs = ranging(data, ops, range_start, on_false_value, name_of(reduce_op))
    also: tuple[View, ...] = ()
    if reduce_res is not None:
        attrs = replace(attrs, reduce_axes=data.ndim - 1)
        also = (reduction_target(reduce_res, data, what),)
    return fresh(RANGE_SELECT, (data, *bounds), attrs, dtype, also=also)


@isa(MAX8, came="2.22")
def max8(*, src: View, mask: Any = None, dtype: Any = None) -> View:
    """The 8 largest elements of each partition, descending: [P, F...] -> [P, 8] (SDK 2.22)."""
    attrs = SearchAttrs(free_axes=src.ndim - 1)
    return fresh(MAX8, (src,), attrs, dtype, mask, (src.shape[0], 8), (ROWS, ALIKE))


def _searching(data: View, vals: View, **more: Any) -> SearchAttrs:
    return SearchAttrs(free_axes=data.ndim - 1, value_axes=vals.ndim - 1, **more)


@isa(FIND8, came="2.22")
def nc_find_index8(*, data: View, vals: View, mask: Any = None, dtype: Any = np.uint32) -> View:
    """First index in each partition of ``data`` of each of ``vals`` [P, 8] -> [P, 8] (SDK 2.22).

    A value that does not occur has no defined index on the device; it gives 0 here.
    """
    attrs, shape, cuts = _searching(data, vals), (data.shape[0], 8), (ROWS, ALIKE, ROWS)
    return fresh(FIND8, (data, vals), attrs, to_dtype(dtype), mask, shape, cuts)


@isa(REPLACE8, came="2.22")
def nc_match_replace8(
    *, data: View, vals: View, imm: float, dst_idx: Any = None, mask: Any = None, dtype: Any = None
) -> View:
    """``data`` with the first occurrence of each of ``vals`` [P, 8] replaced by ``imm`` (SDK 2.22).

    ``dst_idx`` [P, 8] (SDK 2.24) receives the indices of those first occurrences.
    """
    if dst_idx is not None:
        target = tile(dst_idx, "nc_match_replace8")
        finding, cuts = _searching(data, vals), (ROWS, ALIKE, ROWS)
        record(FIND8, (target,), (data, vals), finding, mask, data.shape, cuts)
    attrs = _searching(data, vals, replacement=real(imm, "nc_match_replace8 imm"))
    return fresh(REPLACE8, (data, vals), attrs, dtype, mask, axes=(ALIKE, ALIKE, ROWS))


@isa(STREAM_SHUFFLE, came="2.22")
def nc_stream_shuffle(
    src: View, dst: View, shuffle_mask: Any, *, dtype: Any = None, mask: Any = None
) -> None:
    """In each quadrant of 32 partitions, partition i of ``dst`` = partition ``shuffle_mask[i]`` of
    ``src``; 255 leaves it as it is (SDK 2.22). ``dst`` [32 k, F...] @ SBUF|PSUM; ``src`` may have
    fewer partitions, as in the documentation's broadcast of one."""
    if dst.shape[1:] != src.shape[1:]:
        same_shape("nc_stream_shuffle", dst, src)
    views, attrs = shuffling(
        src, dst, wholes(shuffle_mask, "nc_stream_shuffle mask"), raw=dst.dt is src.dt
    )
    record(STREAM_SHUFFLE, (dst,), views, attrs, mask)


# --- DMA ------------------------------------------------------------------------------------------
# Sources: aws-neuron-sdk v2.21.1 to v2.26.1, general/nki/api/nki/isa/__init__.py.
def transfer(src: View, dtype: Any, mask: Any, skip: bool = False) -> View:
    """A new SBUF tile with the data of ``src``, brought by a DMA; rows outside may be left."""
    dt = result_type(dtype, src.dt)
    return fresh(DMA_COPY, (src,), Attrs(raw=dt is src.dt, skip=skip), dt, mask)


def skips(what: str, mode: Any, *views: View) -> bool:
    """Whether an ``oob_mode`` leaves out rows, which only rows chosen by data may be.

    Without any the mode has nothing to do, and public kernels that name it so ran.
    """
    chosen = any(view.by_data is not None for view in views)
    found = chosen and mode not in (None, bound_modes.error)
    if found:
        _check_core(what, mode, "oob_mode.error", "the option and mask rows out of bounds")
    return found


def _check_core(what: str, given: Any, wanted: str, drop: str) -> None:
    if CORE.number < 3:
        raise refuse(
            "sim_newer_core",
            f"{what} with {given}, expected {wanted} on NeuronCore-v2; drop {drop}, or build for "
            "trn2",
        )


def move(
    dst: View, src: View, mask: Any = None, accumulate: bool = False, skip: bool = False
) -> None:
    """Record one DMA between views of equal shape, axes of size 1 aside.

    Args:
        accumulate: add to what ``dst`` holds instead of replacing it.
        skip: leave rows that data put out of bounds as they are.
    """
    if dst.shape != src.shape:
        if [s for s in src.shape if s != 1] != [s for s in dst.shape if s != 1]:
            raise refuse(
                "err_store_dst_shape_smaller_than_other_shape",
                f"dma of {src.label()} to a region of shape {dst.shape}, expected equal shapes; "
                f"{common_part(dst, src)}"
                + (", inside of both: a slice is not cut to its tensor" if src.oob else ""),
            )
        if src.on_chip and not dst.on_chip and dst.by_data is None:
            dst = dst.reshape(src.shape)
        else:
            src = src.reshape(dst.shape)
    raw = src.dt is dst.dt and not accumulate  # a sum goes through fp32
    record(DMA_COPY, (dst,), (src,), Attrs(raw=raw, accumulate=accumulate, skip=skip), mask)


@isa(DMA_COPY)
def dma_copy(
    src: View,
    dst: View,
    *,
    mask: Any = None,
    dst_rmw_op: Any = None,
    oob_mode: Any = bound_modes.error,
    dge_mode: Any = None,
) -> None:
    """Copy ``src`` to ``dst`` (HBM or SBUF each) with a cast where the types differ.

    ``dst_rmw_op=np.add`` adds to what ``dst`` holds (SDK 2.23).
    """
    if dge_mode is descriptor_modes.hwdge:
        _check_core("dma_copy", dge_mode, "descriptors made in advance", "the option")
    skip = skips("dma_copy", oob_mode, src, dst)
    operator = None if dst_rmw_op is None else name_of(dst_rmw_op)
    if operator not in (None, "add"):
        raise refuse(
            "sim_rmw_operator",
            f"dma_copy with dst_rmw_op '{operator}', expected add; combine the values on chip",
        )
    if dst.on_chip and src.shape[0] > 1 and not src.strides[0] and src.by_data is None:
        warn(
            "sim_refused_on_device",
            f"dma_copy repeats one row of {src.label()} over {src.shape[0]} partitions: "
            f"a device's compiler could not lower that ({_TRIED}, mamba_v3b); load the row, repeat "
            "it with nl.broadcast_to or a product with ones",
        )
    move(dst, src, mask, accumulate=operator is not None, skip=skip)


_TRIED = "Jerry2423/kda-for-trainium 90770f2"


def transposed(src: View, order: Shape, dtype: Any, mask: Any) -> View:
    """A new SBUF tile with the axes of ``src`` in another order."""
    dt = result_type(dtype, src.dt)
    attrs = PermuteAttrs(raw=dt is src.dt, order=order)
    shape = tuple(src.shape[a] for a in order)
    return fresh(DMA_TRANSPOSE, (src,), attrs, dt, mask, shape, (order, ALIKE))


@isa(DMA_TRANSPOSE)
def dma_transpose(src: View, *, axes: Any = None, mask: Any = None, dtype: Any = None) -> View:
    """Transpose by DMA into a new SBUF tile: 2-D [1, 0], 3-D [2, 1, 0], 4-D [3, 1, 2, 0].

    ``src`` @ HBM|SBUF. Element-granular descriptors: very slow on this core.
    """
    order = transposed_axes(src, axes)
    rows = src.shape[order[0]]
    if rows > CORE.partitions:
        raise refuse(
            "err_num_partition_exceed_arch_limit",
            f"Size of partition dimension {rows} exceeds architecture limitation of "
            f"{CORE.partitions} in dma_transpose of {src.label()}; transpose in blocks",
        )
    if src.dt.itemsize > 2:
        warn(
            "sim_transposed_words",
            f"dma_transpose of {src.label()}, expected a 2-byte type: of fp32 a device's "
            f"compiler ended with an internal error ({_TRIED}, rmsnorm_matmul's probe); use "
            "nisa.nc_transpose",
        )
    return transposed(src, order, dtype, mask)
