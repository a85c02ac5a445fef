"""``nki.isa``: copies, fills, selections, searches, gathers, shuffles, random numbers and DMA.

Sources: aws-neuron-sdk v2.21.1 to v2.26.1, general/nki/api/nki/isa/__init__.py. Using a function
that came after 2.21 is a warning, because the kernel does not compile on 2.21.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ..device.dtypes import UINT32, to_dtype
from ..device.errors import refuse, warn
from ..device.spec import CORE
from ..instructions.arguments import dge_mode as descriptor_modes
from ..instructions.arguments import fp32, number, stretched
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
from ..program.attributes import CAST, RAW, Attrs
from ..program.index import Index, Mask, is_integer
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
        expr = Index(int(expr), (0, 0), (1, 1))
    if not isinstance(expr, Index) or expr.ndim < 2:
        raise refuse(
            "sim_iota_expression",
            f"iota got {expr!r}, expected a loop variable or an index expression of at least two "
            "axes such as nl.arange(n)[None, :]",
        )
    attrs = IotaAttrs(values=expr.values())
    return fresh(IOTA, expr.shape, to_dtype(dtype), (), attrs, mask)


@isa(AFFINE_SELECT)
def affine_select(
    pred: Any, on_true_tile: Any, on_false_value: Any, *, mask: Any = None, dtype: Any = None
) -> View:
    """Keep elements where one affine comparison holds, else ``on_false_value``. GpSimdE, SBUF."""
    source = tile(on_true_tile, "affine_select")
    if not isinstance(pred, Mask) or len(pred.terms) != 1:
        raise refuse(
            "sim_affine_select_predicate",
            "affine_select predicate is not one affine comparison, expected e.g. i_q >= i_k; chain "
            "two affine_selects for a conjunction",
        )
    keep = np.broadcast_to(pred.evaluate(source.shape), source.shape)
    if source.storage.buffer == PSUM:
        warn(
            "sim_gpsimd_psum",
            f"affine_select reads {source.label()}: GpSimdE has no PSUM port, the compiler adds a "
            "copy to SBUF; copy it explicitly",
        )
        source = tensor_copy(source)
    attrs = KeepAttrs(keep=keep, on_false=float(on_false_value))
    dt = result_type(dtype, source.dt)
    return fresh(AFFINE_SELECT, source.shape, dt, (source,), attrs, mask)


@isa(LOCAL_GATHER)
def local_gather(
    src_buffer: Any,
    index: Any,
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
    (data,) = rows_only("local_gather", mask, tile(src_buffer, "local_gather"))
    offsets = tile(index, "local_gather")
    attrs = gathering(data, offsets, num_elem_per_idx, num_valid_indices)
    count, width = attrs.count, attrs.width
    found = fresh(LOCAL_GATHER, (data.shape[0], count, width), data.dt, (data, offsets), attrs)
    whole = (*offsets.shape, CORE.gpsimd_partitions, width)  # as AWS's test of the call has it
    return found.reshape(whole) if count == CORE.gpsimd_partitions * offsets.free_size else found


def gather_flattened(data: Any, indices: Any, *, mask: Any = None, dtype: Any = None) -> View:
    """``data`` [P, F...] read at ``indices`` (unsigned, [P, N...]) of its flattened free axes."""
    newer("gather_flattened", "2.24")
    source = tile(data, "gather_flattened")
    index = tile(indices, "gather_flattened")
    if index.dt is not UINT32:
        raise refuse(
            "sim_gather_index_type",
            f"gather_flattened indices {index.label()}, expected uint32; cast them",
        )
    attrs = GatherAttrs(free_axes=source.ndim - 1, index_axes=index.ndim - 1)
    src, dt = (source, index), result_type(dtype, source.dt)
    cuts = (ROWS, ALIKE, ROWS)
    return fresh(GATHER, index.shape, dt, src, attrs, mask, source.shape, cuts)


@isa(SEQUENCE_BOUNDS, came="2.26")
def sequence_bounds(*, segment_ids: Any, dtype: Any = None) -> View:
    """Segment ids [1, n] -> [1, 2, n]: first index and end (exclusive) of each element's segment.

    Id 0 is padding: start n, end -1 (SDK 2.26). Types fp32 or int32.
    """
    ids = tile(segment_ids, "sequence_bounds")
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.dt.name not in ("float32", "int32"):
        raise refuse(
            "sim_sequence_bounds",
            f"sequence_bounds got {ids.label()}, expected fp32 or int32 of shape (1, n); reshape",
        )
    dt = result_type(dtype, ids.dt)
    return fresh(SEQUENCE_BOUNDS, (1, 2, ids.shape[1]), dt, (ids,), Attrs())


def rand(shape: Any, dtype: Any = np.float32) -> View:
    """Tile of uniform numbers in [0, 1); the same in every run, new ones in every call."""
    trace.current("nl.rand")
    size = tuple(int(s) for s in shape)
    src: list[View] = []
    attrs = random_source(src, shape=size)
    return fresh(RAND, size, to_dtype(dtype), tuple(src), attrs)


def random_seed(seed: Any, *, mask: Any = None) -> None:
    """Seed of the random instructions that follow: a number or a (1, 1) integer tile."""
    tracer = trace.current("nl.random_seed")
    if regions.region(mask, (1, 1)) is regions.EMPTY:
        return
    if isinstance(seed, View):
        first = (slice(0, 1),) * 2
        tracer.random = (seed.slice_box(first), 0)
    elif is_integer(seed):
        tracer.random = (int(seed), 0)
    else:
        raise refuse(
            "sim_random_seed",
            f"random_seed got {type(seed).__name__}, expected an integer or an integer tile",
        )


@isa(DROPOUT)
def dropout(data: Any, prob: Any, *, mask: Any = None, dtype: Any = None) -> View:
    """``data`` with elements set to zero with probability ``prob`` (a number or [P, 1])."""
    source = tile(data, "dropout")
    src, probability, at = with_probability(source, prob, lambda: stretched(prob, source, "prob"))
    cuts = [ALIKE] * (1 + len(src))  # the result and the operands of its shape
    attrs = random_source(src, DropoutAttrs, probability=probability, probability_at=at)
    cuts += [WHOLE] * (1 + len(src) - len(cuts))  # a seed that is data stays whole
    dt = result_type(dtype, source.dt)
    return fresh(DROPOUT, source.shape, dt, tuple(src), attrs, mask, axes=cuts)


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
def tensor_copy(src: Any, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> View:
    """Copy a tile within SBUF/PSUM; bit-exact unless the type changes.

    ``src`` [P, F...] @ SBUF|PSUM of any type; result alike @ SBUF (PSUM if assigned there).
    """
    data = tile(src, "tensor_copy")
    dt = result_type(dtype, data.dt)
    choice = choose_engine(engine, "tensor_copy", TENSOR_COPY.engines)
    return fresh(TENSOR_COPY, data.shape, dt, (data,), copy_attrs(dt, data.dt, choice), mask)


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
    choice = choose_engine(engine, "memset", MEMSET.engines)
    attrs = FillAttrs(engine=choice, value=number(value))
    return fresh(MEMSET, tuple(int(s) for s in shape), to_dtype(dtype), (), attrs, mask)


@isa(DYNAMIC_SRC)
def tensor_copy_dynamic_src(src: Any, *, mask: Any = None, dtype: Any = None) -> View:
    """Copy whose source offset is data: ``t[i_p, offset[0, k] + i_f]`` @ SBUF|PSUM.

    ``offset`` is an integer tile in SBUF; the index must stay inside of its axis at run time.
    """
    data = tile(src, "tensor_copy_dynamic_src")
    dt = result_type(dtype, data.dt)
    return fresh(DYNAMIC_SRC, data.shape, dt, (data,), copy_attrs(dt, data.dt), mask)


@isa(DYNAMIC_DST, came="2.22")
def tensor_copy_dynamic_dst(*, dst: Any, src: Any, mask: Any = None, dtype: Any = None) -> None:
    """Copy to a destination whose offset is data (SDK 2.22); ``dtype`` is dst's."""
    target = tile(dst, "tensor_copy_dynamic_dst")
    data = tile(src, "tensor_copy_dynamic_dst")
    same_shape("tensor_copy_dynamic_dst", target, data)
    record(DYNAMIC_DST, (target,), (data,), copy_attrs(target.dt, data.dt), mask)


@isa(COPY_PREDICATED, came="2.22")
def tensor_copy_predicated(
    *,
    src: Any,
    dst: Any,
    predicate: Any,
    mask: Any = None,
    dtype: Any = None,
    reverse_pred: bool = False,
) -> None:
    """``dst`` = ``src`` (a tile or a number) where ``predicate`` (uint8/16/32, or bool as the
    documentation's example has it) is nonzero, else unchanged (SDK 2.22)."""
    target = tile(dst, "tensor_copy_predicated")
    if isinstance(src, (int, float, np.number)):
        src = memset(target.shape, src, target.dtype)
    data = tile(src, "tensor_copy_predicated")
    choice = tile(predicate, "tensor_copy_predicated")
    same_shape("tensor_copy_predicated", target, data, choice)
    if data.dt is not target.dt or not (choice.dt.kind == "u" or choice.dt.name == "bool_"):
        raise refuse(
            "sim_predicated_types",
            f"tensor_copy_predicated got src {data.dt}, dst {target.dt}, predicate {choice.dt}, "
            "expected one type for src and dst and an unsigned predicate; cast first",
        )
    attrs = SelectAttrs(raw=True, reverse=bool(reverse_pred))
    record(COPY_PREDICATED, (target,), (choice, data, target), attrs, mask)


@isa(SELECT_REDUCE, came="2.26")
def select_reduce(
    *,
    dst: Any,
    predicate: Any,
    on_true: Any,
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
    operands = (predicate, dst, on_true)
    choice, target, data = (tile(operand, "select_reduce") for operand in operands)
    same_shape("select_reduce", target, data, choice)
    choice, target, data = rows_only("select_reduce", mask, choice, target, data)
    src = [choice, data]
    constant = None
    if isinstance(on_false, View):
        src.append(stretched(on_false, data, "on_false"))
    else:
        constant = float(on_false)
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
    on_true_tile: Any,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Any,
    bound1: Any,
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
    (data,) = rows_only(what, mask, tile(on_true_tile, what))
    bounds = [stretched(tile(b, what), data, f"{what} bound") for b in (bound0, bound1)]
    if reduce_cmd is not commands.reset_reduce:
        raise refuse(
            "sim_reduce_registers",
            f"{what} with {reduce_cmd}, expected reduce_cmd.reset_reduce: maxima over several "
            "instructions are not simulated; reduce with nisa.tensor_reduce",
        )
    ops = name_of(comp_op0), name_of(comp_op1)
    attrs = ranging(data, ops, range_start, on_false_value, name_of(reduce_op))
    src, dt = (data, *bounds), result_type(dtype, data.dt)
    if reduce_res is None:
        return fresh(RANGE_SELECT, data.shape, dt, src, attrs)
    attrs = replace(attrs, reduce_axes=data.ndim - 1)
    also = (reduction_target(reduce_res, data, what),)
    return fresh(RANGE_SELECT, data.shape, dt, src, attrs, also=also)


@isa(MAX8, came="2.22")
def max8(*, src: Any, mask: Any = None, dtype: Any = None) -> View:
    """The 8 largest elements of each partition, descending: [P, F...] -> [P, 8] (SDK 2.22)."""
    data = tile(src, "max8")
    shape = (data.shape[0], 8)
    attrs = SearchAttrs(free_axes=data.ndim - 1)
    dt = result_type(dtype, data.dt)
    return fresh(MAX8, shape, dt, (data,), attrs, mask, data.shape, (ROWS, ALIKE))


def _search(data: Any, values: Any, what: str) -> tuple[View, View, SearchAttrs]:
    source, wanted = tile(data, what), tile(values, what)
    return source, wanted, SearchAttrs(free_axes=source.ndim - 1, value_axes=wanted.ndim - 1)


@isa(FIND8, came="2.22")
def nc_find_index8(*, data: Any, vals: Any, mask: Any = None, dtype: Any = np.uint32) -> View:
    """First index in each partition of ``data`` of each of ``vals`` [P, 8] -> [P, 8] (SDK 2.22).

    A value that does not occur has no defined index on the device; it gives 0 here.
    """
    source, wanted, attrs = _search(data, vals, "nc_find_index8")
    shape, src = (source.shape[0], 8), (source, wanted)
    cuts = (ROWS, ALIKE, ROWS)
    return fresh(FIND8, shape, to_dtype(dtype), src, attrs, mask, source.shape, cuts)


@isa(REPLACE8, came="2.22")
def nc_match_replace8(
    *, data: Any, vals: Any, imm: float, dst_idx: Any = None, mask: Any = None, dtype: Any = None
) -> View:
    """``data`` with the first occurrence of each of ``vals`` [P, 8] replaced by ``imm`` (SDK 2.22).

    ``dst_idx`` [P, 8] (SDK 2.24) receives the indices of those first occurrences.
    """
    source, wanted, attrs = _search(data, vals, "nc_match_replace8")
    if dst_idx is not None:
        target = tile(dst_idx, "nc_match_replace8")
        record(FIND8, (target,), (source, wanted), attrs, mask, source.shape, (ROWS, ALIKE, ROWS))
    attrs = replace(attrs, replacement=float(imm))
    dt, src = result_type(dtype, source.dt), (source, wanted)
    return fresh(REPLACE8, source.shape, dt, src, attrs, mask, axes=(ALIKE, ALIKE, ROWS))


@isa(STREAM_SHUFFLE, came="2.22")
def nc_stream_shuffle(
    src: Any, dst: Any, shuffle_mask: Any, *, dtype: Any = None, mask: Any = None
) -> None:
    """In each quadrant of 32 partitions, partition i of ``dst`` = partition ``shuffle_mask[i]`` of
    ``src``; 255 leaves it as it is (SDK 2.22). ``dst`` [32 k, F...] @ SBUF|PSUM; ``src`` may have
    fewer partitions, as in the documentation's broadcast of one."""
    data, target = tile(src, "nc_stream_shuffle"), tile(dst, "nc_stream_shuffle")
    if target.shape[1:] != data.shape[1:]:
        same_shape("nc_stream_shuffle", target, data)
    views, attrs = shuffling(data, target, map(int, shuffle_mask), raw=target.dt is data.dt)
    record(STREAM_SHUFFLE, (target,), views, attrs, mask)


# --- DMA ------------------------------------------------------------------------------------------
# Sources: aws-neuron-sdk v2.21.1 to v2.26.1, general/nki/api/nki/isa/__init__.py.
def transfer(src: View, dtype: Any, mask: Any) -> View:
    """A new SBUF tile with the data of ``src``, brought by a DMA."""
    dt = result_type(dtype, src.dt)
    return fresh(DMA_COPY, src.shape, dt, (src,), RAW if dt is src.dt else CAST, mask)


def move(dst: View, src: View, mask: Any = None, accumulate: bool = False) -> None:
    """Record one DMA between views of equal shape, axes of size 1 aside.

    Args:
        accumulate: add to what ``dst`` holds instead of replacing it.
    """
    if dst.shape != src.shape:
        if [s for s in src.shape if s != 1] != [s for s in dst.shape if s != 1]:
            raise refuse(
                "err_store_dst_shape_smaller_than_other_shape",
                f"dma of {src.label()} to a region of shape {dst.shape}, expected equal shapes; "
                "slice both sides alike"
                + (", inside of both: a slice is not cut to its tensor" if src.oob else ""),
            )
        if src.on_chip and not dst.on_chip and dst.by_data is None:
            dst = dst.reshape(src.shape)
        else:
            src = src.reshape(dst.shape)
    attrs = RAW if src.dt is dst.dt else CAST
    if accumulate:  # a sum goes through fp32
        attrs = Attrs(accumulate=True)
    record(DMA_COPY, (dst,), (src,), attrs, mask)


@isa(DMA_COPY)
def dma_copy(
    src: Any,
    dst: Any,
    *,
    mask: Any = None,
    dst_rmw_op: Any = None,
    oob_mode: Any = bound_modes.error,
    dge_mode: Any = None,
) -> None:
    """Copy ``src`` to ``dst`` (HBM or SBUF each) with a cast where the types differ.

    ``dst_rmw_op=np.add`` adds to what ``dst`` holds (SDK 2.23).
    """
    source, target = tile(src, "dma_copy"), tile(dst, "dma_copy")
    # Only rows chosen by data can be skipped; without any the mode has nothing to do, and public
    # kernels that name it so ran.
    by_data = source.by_data is not None or target.by_data is not None
    skips = oob_mode is not bound_modes.error and by_data
    if dge_mode is descriptor_modes.hwdge or skips:
        raise refuse(
            "sim_newer_core",
            f"dma_copy with {dge_mode} and {oob_mode}, expected descriptors made in advance and "
            "oob_mode.error on NeuronCore-v2; drop the options and mask rows out of bounds",
        )
    operator = None if dst_rmw_op is None else name_of(dst_rmw_op)
    if operator not in (None, "add"):
        raise refuse(
            "sim_rmw_operator",
            f"dma_copy with dst_rmw_op '{operator}', expected add; combine the values on chip",
        )
    if target.on_chip and source.shape[0] > 1 and not source.strides[0]:
        warn(
            "sim_refused_on_device",
            f"dma_copy repeats one row of {source.label()} over {source.shape[0]} partitions: "
            f"a device's compiler could not lower that ({_TRIED}, mamba_v3b); load the row, repeat "
            "it with nl.broadcast_to or a product with ones",
        )
    move(target, source, mask, accumulate=operator is not None)


_TRIED = "Jerry2423/kda-for-trainium 90770f2"


def transposed(src: View, order: tuple[int, ...], dtype: Any, mask: Any) -> View:
    """A new SBUF tile with the axes of ``src`` in another order."""
    dt = result_type(dtype, src.dt)
    attrs = PermuteAttrs(raw=dt is src.dt, order=order)
    shape = tuple(src.shape[a] for a in order)
    return fresh(DMA_TRANSPOSE, shape, dt, (src,), attrs, mask, src.shape, (order, ALIKE))


@isa(DMA_TRANSPOSE)
def dma_transpose(src: Any, *, axes: Any = None, mask: Any = None, dtype: Any = None) -> View:
    """Transpose by DMA into a new SBUF tile: 2-D [1, 0], 3-D [2, 1, 0], 4-D [3, 1, 2, 0].

    ``src`` @ HBM|SBUF. Element-granular descriptors: very slow on this core.
    """
    source = tile(src, "dma_transpose")
    order = transposed_axes(source, axes)
    rows = source.shape[order[0]]
    if rows > CORE.partitions:
        raise refuse(
            "err_num_partition_exceed_arch_limit",
            f"Size of partition dimension {rows} exceeds architecture limitation of "
            f"{CORE.partitions} in dma_transpose of {source.label()}; transpose in blocks",
        )
    if source.dt.itemsize > 2:
        warn(
            "sim_transposed_words",
            f"dma_transpose of {source.label()}, expected a 2-byte type: of fp32 a device's "
            f"compiler ended with an internal error ({_TRIED}, rmsnorm_matmul's probe); use "
            "nisa.nc_transpose",
        )
    return transposed(source, order, dtype, mask)
