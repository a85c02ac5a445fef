"""Copies, fills, selections, searches and shuffles, of VectorE and of engines that share them.

Sources: aws-neuron-sdk v2.21.1 to v2.26.1, general/nki/api/nki/isa/__init__.py. Functions marked
"SDK 2.2x" came after 2.21; using one is a warning, because the kernel does not compile on 2.21.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..device.dtypes import DType, to_dtype
from ..device.errors import refuse
from ..device.spec import CORE, Engine
from ..program import trace
from ..program.attributes import CAST, RAW, Attrs
from ..program.program import Instruction
from ..program.storage import Frame, Source, Storage
from ..program.view import View, compose
from . import operators
from .alu import reduce_last
from .arguments import (
    choose_engine,
    isa,
    number,
    reduction_target,
    result_type,
    same_shape,
    stretched,
    tile,
)
from .constants import reduce_cmd as commands
from .entry import (
    PSUM,
    SBUF,
    OpSpec,
    first_operand,
    flat,
    free_elements,
    one_psum_operand,
    streaming,
    stride_factor,
)
from .recorder import ALIKE, ROWS, fresh, record, rows_only

# --- copies ---------------------------------------------------------------------------------------
TENSOR_COPY = OpSpec(
    "tensor_copy",
    "copy",
    Attrs,
    first_operand,
    lambda i: max(CORE.min_ii, free_elements(i) * stride_factor(i)),  # an element a cycle
    serves_as_well=Engine.SCALAR,
    note="bit-exact between equal types on VectorE and GpSimdE, else through fp32",
    engines=(Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD),
    tiles=1,
)


def copy_attrs(dst: DType, src: DType, engine: Engine | None = None) -> Attrs:
    """Attributes of a copy: bit-exact between equal types, except on ScalarE."""
    if engine is None:
        return RAW if dst is src else CAST
    return Attrs(engine=engine, raw=dst is src and engine is not Engine.SCALAR)


def copy_instruction(
    dst: View, src: View, frame: Frame | None, source: Source | None
) -> Instruction:
    """A tensor_copy that is not recorded (for repairs of the instruction list)."""
    return Instruction(TENSOR_COPY, (dst,), (src,), copy_attrs(dst.dt, src.dt), frame, source)


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


# --- constants ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FillAttrs(Attrs):
    """Attributes of a constant.

    Attributes:
        value: what every element becomes.
    """

    value: Any


def _fill_cycles(i: Instruction) -> float:
    """Zeros of 2-byte types go two a cycle (docstring)."""
    out = i.dst[0]
    half = FillAttrs.of(i).value == 0 and out.dt.itemsize == 2
    return max(CORE.min_ii, out.free_size / 2 if half else out.free_size)


MEMSET = OpSpec(
    "memset",
    "fill",
    FillAttrs,
    lambda attrs, _: torch.tensor(attrs.value),
    _fill_cycles,
    reads=(),
    note="N/2 cycles for zeros of 2-byte types",
    engines=(Engine.VECTOR, Engine.GPSIMD),
    operands=(0, 0),
    fills=True,
    rate=1.25,
)


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


# --- copies with a run-time offset or predicate ---------------------------------------------------
DYNAMIC_OFFSET_CYCLES = 600  # nisa.tensor_copy_dynamic_src: about 600 cycles to read the offset


def _dynamic_cycles(i: Instruction) -> float:
    return max(DYNAMIC_OFFSET_CYCLES, i.dst[0].free_size)


DYNAMIC_SRC = OpSpec(
    "tensor_copy_dynamic_src",
    "copy",
    Attrs,
    first_operand,
    _dynamic_cycles,
    indirect=True,
    note="source offset read from SBUF at run time; about 600 cycles",
    engines=TENSOR_COPY.engines,
)
DYNAMIC_DST = OpSpec(
    "tensor_copy_dynamic_dst",
    "copy",
    Attrs,
    first_operand,
    _dynamic_cycles,
    indirect=True,
    note="SDK 2.22: destination offset read from SBUF at run time",
    engines=TENSOR_COPY.engines,
)


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SelectAttrs(Attrs):
    """Attributes of a choice between two operands, element by element.

    Attributes:
        on_false: what elements become that are not chosen, where no operand says so.
        reverse: the predicate chooses where it is zero.
    """

    on_false: float | int | None = None
    reverse: bool = False


def _predicated_cycles(i: Instruction) -> float:
    """N with an operand in PSUM, else 2N (docstring)."""
    n = i.dst[0].free_size
    one_psum = PSUM in (i.src[0].storage.buffer, i.src[1].storage.buffer)
    return max(CORE.min_ii, n if one_psum else 2 * n)


COPY_PREDICATED = OpSpec(
    "tensor_copy_predicated",
    "elementwise",
    SelectAttrs,
    lambda attrs, xs: torch.where((xs[0].to(torch.int64) != 0) ^ attrs.reverse, xs[1], xs[2]),
    _predicated_cycles,
    rules=one_psum_operand,
    note="SDK 2.22: copies where an integer predicate is nonzero, keeps the rest",
    operands=(3, 3),
)


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


# --- selections -----------------------------------------------------------------------------------
def _select(attrs: SelectAttrs, xs: list[torch.Tensor]) -> Any:
    chosen = xs[0] != 0
    other = xs[2] if len(xs) > 2 else torch.tensor(attrs.on_false, dtype=xs[1].dtype)
    values = torch.where(~chosen if attrs.reverse else chosen, xs[1], other)
    if not attrs.reduce_axes:
        return values
    return values, reduce_last("maximum", values, attrs.reduce_axes)


SELECT = OpSpec(
    "select",
    "elementwise",
    SelectAttrs,
    _select,
    streaming(2.0),
    note="nl.where: predicate, value if nonzero, value or constant otherwise",
    operands=(2, 3),
    published=False,
)
SELECT_REDUCE = OpSpec(
    "select_reduce",
    "elementwise",
    SelectAttrs,
    _select,
    streaming(2.0, CORE.min_ii),
    note="SDK 2.26: select by predicate, optionally the row maximum",
    operands=(2, 3),
    results=2,
    published=False,
    compares="reduction",
)


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
        if operators.name_of(reduce_op) != "maximum" or not resets:
            raise refuse(
                "sim_select_reduce_command",
                f"select_reduce with {reduce_op} and {reduce_cmd}, expected np.max and "
                "reduce_cmd.reset_reduce on this core; reduce with nisa.tensor_reduce",
            )
        results = (target, reduction_target(reduce_res, data, "select_reduce"))
        reduce_axes = data.ndim - 1
    attrs = SelectAttrs(on_false=constant, reverse=bool(reverse_pred), reduce_axes=reduce_axes)
    record(SELECT_REDUCE, results, tuple(src), attrs)


@isa(None)
def range_select(**_: Any) -> View:
    """An instruction of NeuronCore-v3 only."""
    raise refuse(
        "sim_newer_core",
        "range_select runs on NeuronCore-v3 and newer, expected instructions of NeuronCore-v2; "
        "use nisa.affine_select, or compare and nl.where",
    )


# --- search of the eight largest ------------------------------------------------------------------
SEARCH_MIN, SEARCH_MAX = 8, 16384  # elements per partition that max8 and its kin take


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SearchAttrs(Attrs):
    """Attributes of the search for the eight largest.

    Attributes:
        free_axes, value_axes: free axes of the data and of the values that are searched for.
        replacement: what found elements become.
        successive: equal values take successive occurrences, the last value in ``_replace8`` the
            first of them; a value that does not occur gives all ones (as since SDK 2.29).
    """

    free_axes: int
    value_axes: int = 1
    replacement: float = 0.0
    successive: bool = False


def _find8(attrs: SearchAttrs, xs: list[torch.Tensor]) -> torch.Tensor:
    data, values = flat(xs[0], attrs.free_axes), flat(xs[1], attrs.value_axes)
    if attrs.successive:
        return _successive(data, values)
    return (data[..., None, :] == values[..., None]).to(torch.uint8).argmax(-1).to(torch.float32)


def _successive(data: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Index of each value; the k-th of equal values gets the k-th occurrence; else all ones."""
    equal = data[..., None, :] == values[..., None]
    number = equal.to(torch.int32).cumsum(-1)  # which occurrence a match is
    same = values[..., :, None] == values[..., None, :]
    before = same.to(torch.int32).tril(-1).sum(-1)  # equal values that come earlier
    hit = equal & (number == before[..., None] + 1)
    index = hit.to(torch.uint8).argmax(-1).to(torch.float64)
    return torch.where(hit.any(-1), index, float(2**32 - 1))


def _replace8(attrs: SearchAttrs, xs: list[torch.Tensor]) -> torch.Tensor:
    """Each value in turn replaces its first occurrence that is left."""
    data, values = flat(xs[0], attrs.free_axes).clone(), flat(xs[1], attrs.value_axes)
    left = torch.ones_like(data, dtype=torch.bool)
    for k in reversed(range(8)) if attrs.successive else range(8):
        hit = (data == values[..., k : k + 1]) & left
        at = hit.to(torch.uint8).argmax(-1, keepdim=True)
        found = hit.gather(-1, at)
        data.scatter_(-1, at, torch.where(found, attrs.replacement, data.gather(-1, at)))
        left.scatter_(-1, at, ~found & left.gather(-1, at))
    return data.reshape(xs[0].shape)


def _search_rules(i: Instruction) -> None:
    n = i.src[0].free_size
    if not SEARCH_MIN <= n <= SEARCH_MAX:
        raise refuse(
            "sim_search_size",
            f"{i.op.name} got {i.src[0].label()} with {n} elements per partition, expected "
            f"{SEARCH_MIN} to {SEARCH_MAX}; search in pieces",
        )
    if len(i.src) > 1 and i.src[1].free_size != 8:
        raise refuse(
            "sim_search_values",
            f"{i.op.name} got values {i.src[1].label()}, expected 8 per partition; take those of "
            "nisa.max8",
        )


def _define_search(
    name: str, compute: Callable, note: str, operands: int = 2, compares: str = "operands"
) -> OpSpec:
    return OpSpec(
        name,
        "all",
        SearchAttrs,
        compute,
        lambda i: max(CORE.min_ii, i.src[0].free_size),
        rules=_search_rules,
        box_mend="slice the operand instead",
        note=note,
        operands=(operands, operands),
        compares=compares,
    )


MAX8 = _define_search(
    "max8",
    lambda attrs, xs: flat(xs[0], attrs.free_axes).topk(8, dim=-1).values,
    "SDK 2.22: the 8 largest per partition, descending",
    1,
    "results",
)
FIND8 = _define_search("nc_find_index8", _find8, "SDK 2.22: first index of each of 8 values")
REPLACE8 = _define_search(
    "nc_match_replace8", _replace8, "SDK 2.22: replaces the first occurrence of each of 8 values"
)


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


# --- shuffle --------------------------------------------------------------------------------------
KEEP_LANE = 255  # shuffle mask entry that leaves a partition as it is


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ShuffleAttrs(Attrs):
    """Attributes of a permutation of partitions.

    Attributes:
        lanes: for each partition of a quadrant the one it takes, or KEEP_LANE.
        ndim: axes of the operands.
        rounds: fewer partitions count as the next multiple of 32 (since SDK 2.29).
        rows: partitions of the result, where the source has others; 0 for as many.
    """

    lanes: tuple[int, ...]
    ndim: int
    rounds: bool = False
    rows: int = 0

    def sources(self, given: int) -> tuple[np.ndarray, np.ndarray]:
        """For each partition of the result its source partition, and whether it keeps its content.

        A partition that keeps its own names partition 0, which nobody reads.
        """
        return _taken(self.lanes, self.rows or given)


@functools.cache
def _taken(lanes: tuple[int, ...], count: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(count)
    picked = np.array(lanes)[rows % CORE.quadrant_partitions]
    keep = picked == KEEP_LANE
    return np.where(keep, 0, rows - rows % CORE.quadrant_partitions + picked), keep


def _shuffle(attrs: ShuffleAttrs, xs: list[torch.Tensor]) -> torch.Tensor:
    axis = xs[0].ndim - attrs.ndim
    source, keep = attrs.sources(xs[0].shape[axis])
    moved = xs[0].index_select(axis, torch.as_tensor(source))
    if not keep.any():
        return moved
    column = torch.as_tensor(keep).reshape(-1, *(1,) * (attrs.ndim - 1))
    return torch.where(column, xs[1], moved)


def _shuffle_rules(i: Instruction) -> None:
    attrs, rows = ShuffleAttrs.of(i), i.dst[0].shape[0]
    if rows % CORE.quadrant_partitions and not attrs.rounds:
        raise refuse(
            "sim_shuffle_partitions",
            f"nc_stream_shuffle into {i.dst[0].label()}, expected 32, 64, 96 or 128 partitions; "
            "pad the tile",
        )
    if attrs.sources(rows)[0].max() >= i.src[0].shape[0]:
        raise refuse(
            "sim_shuffle_mask",
            f"nc_stream_shuffle mask {attrs.lanes} for {i.src[0].label()} into "
            f"{i.dst[0].label()}, expected partitions that src has: each quadrant of dst takes "
            "from the same quadrant of src",
        )


STREAM_SHUFFLE = OpSpec(
    "nc_stream_shuffle",
    "lanes",
    ShuffleAttrs,
    _shuffle,
    streaming(),
    rules=_shuffle_rules,
    same_partitions=False,
    note="SDK 2.22: permutes partitions inside each quadrant of 32",
    operands=(1, 2),
)


def shuffling(
    data: View, target: View, mask: Iterable[int], **more: Any
) -> tuple[tuple[View, ...], ShuffleAttrs]:
    """Sources and attributes of a shuffle by the checked ``mask``."""
    lanes, quadrant = tuple(mask), CORE.quadrant_partitions
    if len(lanes) != quadrant or any(k != KEEP_LANE and not 0 <= k < quadrant for k in lanes):
        raise refuse(
            "sim_shuffle_mask",
            f"nc_stream_shuffle mask {lanes}, expected 32 numbers from 0 to 31 or 255",
        )
    views = (data, target) if KEEP_LANE in lanes else (data,)
    return views, ShuffleAttrs(lanes=lanes, ndim=data.ndim, rows=target.shape[0], **more)


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
