"""Copies, fills, selections, searches and shuffles of VectorE and engines that share them; DMA.

Sources: aws-neuron-sdk v2.21.1 to v2.26.1, general/nki/api/nki/isa/__init__.py. Functions marked
"SDK 2.2x" came after 2.21; using one is a warning, because the kernel does not compile on 2.21.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ..device.dtypes import DType, Shape, Tensors
from ..device.errors import refuse
from ..device.spec import CORE, Engine
from ..program.attributes import CAST, RAW, Attrs, constants
from ..program.program import Instruction
from ..program.storage import Frame, Source
from ..program.view import View
from .alu import reduce_last
from .entry import (
    ANY_HBM,
    PSUM,
    SBUF,
    OpSpec,
    first_operand,
    flat,
    free_elements,
    no_cycles,
    one_psum_operand,
    streaming,
    stride_factor,
)

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


# --- constants ------------------------------------------------------------------------------------
@constants
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


# --- copies with a run-time offset or predicate ---------------------------------------------------
DYNAMIC_OFFSET_CYCLES = 600  # nisa.tensor_copy_dynamic_src: about 600 cycles to read the offset


DYNAMIC_SRC, DYNAMIC_DST = (
    OpSpec(
        f"tensor_copy_dynamic_{side}",
        "copy",
        Attrs,
        first_operand,
        lambda i: max(DYNAMIC_OFFSET_CYCLES, i.dst[0].free_size),
        indirect=True,
        note=note,
        engines=TENSOR_COPY.engines,
    )
    for side, note in (
        ("src", "source offset read from SBUF at run time; about 600 cycles"),
        ("dst", "SDK 2.22: destination offset read from SBUF at run time"),
    )
)


@constants
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


# --- selections -----------------------------------------------------------------------------------
def _select(attrs: SelectAttrs, xs: Tensors) -> Any:
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


# --- search of the eight largest ------------------------------------------------------------------
SEARCH_MIN, SEARCH_MAX = 8, 16384  # elements per partition that max8 and its kin take


@constants
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


def _find8(attrs: SearchAttrs, xs: Tensors) -> torch.Tensor:
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


def _replace8(attrs: SearchAttrs, xs: Tensors) -> torch.Tensor:
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
        few = f"copy it into a tile of {SEARCH_MIN} columns that holds -3e38 everywhere"
        raise refuse(
            "sim_search_size",
            f"{i.op.name} got {i.src[0].label()} with {n} elements per partition, expected "
            f"{SEARCH_MIN} to {SEARCH_MAX}; {few if n < SEARCH_MIN else 'search in pieces'}",
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


# --- shuffle --------------------------------------------------------------------------------------
KEEP_LANE = 255  # shuffle mask entry that leaves a partition as it is


@constants
class ShuffleAttrs(Attrs):
    """Attributes of a permutation of partitions.

    Attributes:
        lanes: for each partition of a quadrant the one it takes, or KEEP_LANE.
        ndim: axes of the operands.
        rounds: fewer partitions count as the next multiple of 32 (since SDK 2.29).
        rows: partitions of the result, where the source has others; 0 for as many.
    """

    lanes: Shape
    ndim: int
    rounds: bool = False
    rows: int = 0

    def sources(self, given: int) -> tuple[np.ndarray, np.ndarray]:
        """For each partition of the result its source partition, and whether it keeps its content.

        A partition that keeps its own names partition 0, which nobody reads.
        """
        return _taken(self.lanes, self.rows or given)


@functools.cache
def _taken(lanes: Shape, count: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(count)
    picked = np.array(lanes)[rows % CORE.quadrant_partitions]
    keep = picked == KEEP_LANE
    return np.where(keep, 0, rows - rows % CORE.quadrant_partitions + picked), keep


def _shuffle(attrs: ShuffleAttrs, xs: Tensors) -> torch.Tensor:
    axis = xs[0].ndim - attrs.ndim
    source, keep = attrs.sources(xs[0].shape[axis])
    moved = xs[0].index_select(axis, torch.as_tensor(source))
    if not keep.any():
        return moved
    return torch.where(torch.as_tensor(keep).reshape(-1, *(1,) * (attrs.ndim - 1)), xs[1], moved)


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
            "from the same quadrant of src; give src as many partitions as dst",
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
            f"nc_stream_shuffle mask {lanes[:quadrant]} of {len(lanes)} numbers, expected 32 from "
            "0 to 31 or 255, for each 32 partitions alike; "
            + (
                "write [0] * 32 to repeat the first of them"
                if len(lanes) <= quadrant
                else "across all partitions copy parts with nisa.dma_copy"
            ),
        )
    views = (data, target) if KEEP_LANE in lanes else (data,)
    return views, ShuffleAttrs(lanes=lanes, ndim=data.ndim, rows=target.shape[0], **more)


# --- copies ---------------------------------------------------------------------------------------
# --- DMA ------------------------------------------------------------------------------------------
# Copies between HBM and SBUF, and transposes. ``time/cost.py`` computes a transfer's time from its
# rows.
def _dma_rules(i: Instruction) -> None:
    for view in (*i.dst, i.src[0]):
        if not view.storage.on_chip:
            continue
        if len(view.shape) < 2:
            raise refuse(
                "sim_rank",
                f"Insufficient rank: {view.label()}, expected at least 2 axes; "
                "reshape it to (1, n) or (n, 1)",
            )
        if view.shape[0] > CORE.partitions:
            raise refuse(
                "err_num_partition_exceed_arch_limit",
                f"Size of partition dimension {view.shape[0]} exceeds architecture limitation of "
                f"{CORE.partitions} in dma of {view.label()}; tile the partition axis",
            )


ANYWHERE = (*ANY_HBM, SBUF)
dma = functools.partial(
    OpSpec, engine=Engine.DMA, reads=ANYWHERE, writes=ANYWHERE, same_partitions=False
)
DMA_COPY = dma(
    "dma_copy",
    "copy",
    Attrs,
    first_operand,
    no_cycles,
    rules=_dma_rules,
    indirect=True,
    note="HBM/SBUF to HBM/SBUF with cast; nl.load and nl.store; rows may be indirect",
)


SOURCES = 16  # of one dma_compute


def _sum(attrs: Attrs, xs: Tensors) -> torch.Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


DMA_SUM = dma(
    "dma_compute",
    "elementwise",
    Attrs,
    _sum,
    no_cycles,
    rules=_dma_rules,
    indirect=True,
    note="SDK 2.29: the sum of up to 16 sources, added in fp32 on the way",
    operands=(1, SOURCES),
)


@constants
class ExchangeAttrs(Attrs):
    """Attributes of an exchange between cores.

    Attributes:
        senders: whose tile each core receives.
    """

    senders: Shape


def _exchange(attrs: ExchangeAttrs, xs: Tensors) -> Tensors:
    copies = [x.clone() for x in xs]
    return [copies[core] for core in attrs.senders]


EXCHANGE = OpSpec(
    "sendrecv",
    "meeting",
    ExchangeAttrs,
    _exchange,
    no_cycles,
    engine=Engine.DMA,
    reads=(SBUF,),
    writes=(SBUF,),
    rules=_dma_rules,
    note="NeuronCore-v3: tiles of two cores change places",
    operands=(2, 2),
    results=2,
    generation=3,
)


# --- transposes -----------------------------------------------------------------------------------
TRANSPOSED_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


@constants
class PermuteAttrs(Attrs):
    """Attributes of a transpose by DMA.

    Attributes:
        order: the operand's axis that each axis of the result is.
    """

    order: Shape


def _permute(attrs: PermuteAttrs, xs: Tensors) -> torch.Tensor:
    lead = xs[0].ndim - len(attrs.order)
    return xs[0].permute(*range(lead), *(lead + a for a in attrs.order))


DMA_TRANSPOSE = dma(
    "dma_transpose",
    "permute",
    PermuteAttrs,
    _permute,
    no_cycles,
    writes=(SBUF,),
    by_element=True,
    box_mend="slice the operand instead",
    note="element-granular descriptors: very slow on this core",
)


def transposed_axes(src: View, axes: Any) -> Shape:
    """The order of axes that a transpose of ``src`` makes; refuses another one."""
    order = TRANSPOSED_AXES.get(src.ndim)
    if order is None or (axes is not None and tuple(axes) != order):
        raise refuse(
            "sim_dma_transpose_axes",
            f"dma_transpose of {src.label()} with axes {axes}, expected 2 to 4 axes and the "
            f"order {order or list(TRANSPOSED_AXES.values())}; leave axes= out, or write that",
        )
    return order
