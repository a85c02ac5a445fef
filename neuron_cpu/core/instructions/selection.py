"""Instructions that choose, search, gather and shuffle elements, and random numbers.

The rest of ``nki.isa``: table entry and public function stand together. Signatures and semantics:
aws-neuron-sdk v2.21.1 to v2.26.1, general/nki/api/nki/isa/__init__.py. Functions marked "SDK 2.2x"
came after 2.21; using one is a warning, because the kernel then does not compile on 2.21.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..device.dtypes import FLOAT32, UINT32, DType, to_dtype
from ..device.errors import refuse, warn
from ..device.spec import GEN2, Engine
from ..language.tensor import Tensor
from ..program import trace
from ..program.index import is_integer
from ..program.program import Instruction
from . import isa, operators, table
from .table import MIN_II, ON_CHIP, PSUM, SBUF, define, streaming

SHUFFLE_LANES = 32  # partitions of one quadrant
KEEP_LANE = 255  # shuffle mask entry that leaves a partition as it is
SEARCH_MIN, SEARCH_MAX = 8, 16384  # elements per partition that max8 and its kin take
DYNAMIC_OFFSET_CYCLES = 600  # nisa.tensor_copy_dynamic_src: about 600 cycles to read the offset
GATHER_WIDTHS = (1, 2, 4, 8, 16, 32)


# --- helpers --------------------------------------------------------------------------------------
def _newer(name: str, release: str) -> None:
    warn(
        "sim_newer_api",
        f"nisa.{name} needs SDK {release} or newer, expected functions of 2.21; the kernel does "
        "not compile there",
    )


def _fresh(
    op: table.OpSpec,
    shape: tuple[int, ...],
    dt: DType,
    src: tuple[Tensor, ...],
    attrs: dict,
    mask: Any = None,
    axes: tuple[int | None, ...] = (),
) -> Tensor:
    """Record ``op`` into a fresh SBUF tile whose shape differs from its operands'.

    A mask over ``src[0]`` cuts it, the rows of the others, and those axes of the result that
    ``axes`` says are axes of ``src[0]``.
    """
    tracer = trace.current(f"nisa.{op.name}")
    made = tracer.storage(shape, dt, SBUF)
    out = dst = Tensor.whole(made)
    cut = trace.region(mask, src[0].shape) if mask is not None else None
    if cut is trace.EMPTY:
        return out
    if isinstance(cut, tuple):
        box = [slice(0, n) if a is None else cut[a] for a, n in zip(axes, shape)]
        dst = out.slice_box(tuple(box))
        rest = [s.slice_box((cut[0], *(slice(0, n) for n in s.shape[1:]))) for s in src[1:]]
        src = (src[0].slice_box(cut), *rest)
    elif cut is not None:
        raise _no_box(op.name, src[0])
    made.producer = tracer.emit(op, (dst,), src, attrs)
    return out


def _into(
    op: table.OpSpec, dst: Tensor, src: tuple[Tensor, ...], attrs: dict[str, Any], mask: Any = None
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
    isa.note_written(dst)


def _rows_only(data: Tensor, mask: Any, what: str) -> Tensor:
    """``data`` cut by a mask that selects whole rows or columns (instructions over a whole row)."""
    cut = trace.region(mask, data.shape) if mask is not None else None
    if cut is None:
        return data
    if not isinstance(cut, tuple):
        raise _no_box(what, data)
    return data.slice_box(cut)


def _no_box(what: str, data: Tensor) -> Exception:
    return refuse(
        "sim_reduce_mask",
        f"mask of {what} is no box of {data.label()}, expected one bound per axis and at least "
        "one element; slice the operand instead",
    )


def _same_shape(what: str, *views: Tensor) -> None:
    for view in views[1:]:
        if view.shape != views[0].shape:
            raise refuse(
                "sim_shape_mismatch",
                f"{what} got {views[0].label()} and {view.label()}, expected equal shapes; slice "
                "both alike",
            )


def _no_psum(i: Instruction) -> None:
    table._no_psum(i, f"{i.op.name} on GpSimdE")


def _flat(x: torch.Tensor, free_axes: int) -> torch.Tensor:
    """[..., P, F...] -> [..., P, N]."""
    return x.flatten(-free_axes) if free_axes > 1 else x


# --- scalar_tensor_tensor and the reduction over partitions ---------------------------------------
def _scalar_tensor_tensor_cycles(i: Instruction) -> float:
    n = i.dst[0].free_size
    types = {i.src[0].dt.name, i.src[1].dt.name}
    steps = (i.attrs["op0"], i.attrs["op1"])
    fast = types == {"bfloat16"} and steps == ("subtract", "multiply") and n % 2 == 0
    return max(MIN_II, n if fast else 2 * n)


def _two_tensors_rules(i: Instruction) -> None:
    table._not_both_psum(i, i.src[0], i.src[1])


SCALAR_TENSOR_TENSOR = define(
    "scalar_tensor_tensor", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP,
    flow="elementwise", compute=table._tensor_scalar, cycles=_scalar_tensor_tensor_cycles,
    rules=_two_tensors_rules,
    note="(data op0 scalar or vector) op1 tensor; 2N cycles",
)  # fmt: skip


def scalar_tensor_tensor(
    *,
    data: Any,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    dtype: Any = None,
    mask: Any = None,
) -> Tensor:
    """``(data op0 operand0) op1 operand1``: operand0 a number or [P, 1], operand1 of data's shape.

    ``data``, ``operand1`` [P, N] @ SBUF|PSUM, not both in PSUM; ``reverse`` swaps arguments.
    """
    first = isa.tile(data, "scalar_tensor_tensor")
    second = isa.tile(operand1, "scalar_tensor_tensor")
    if first.shape[0] != second.shape[0]:
        raise refuse(
            "err_num_partition_mismatch",
            f"scalar_tensor_tensor got {first.label()} and {second.label()}, expected equal "
            "partition counts; slice both to the same partitions",
        )
    _same_shape("scalar_tensor_tensor", first, second)
    src = [first, second]
    attrs = isa._operand("0", op0, operand0, reverse0, src)
    attrs |= {"op1": operators.name_of(op1), "at1": 1}
    if reverse1:
        attrs["reverse1"] = True
    attrs |= isa._step_classes(attrs, src, "scalar_tensor_tensor")
    dt = first.dt if dtype is None else to_dtype(dtype)
    tracer = trace.current("nisa.scalar_tensor_tensor")
    return tracer.result(SCALAR_TENSOR_TENSOR, first.shape, dt, tuple(src), attrs, mask)


def _partition_reduce(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    x = xs[0].movedim(-attrs["ndim"], -1)
    return table.reduce_last(attrs["op"], x, 1).unsqueeze(-attrs["ndim"])


PARTITION_REDUCE = define(
    "tensor_partition_reduce", engine=Engine.GPSIMD, reads=(SBUF,), writes=(SBUF,),
    flow="partitions", compute=_partition_reduce, same_partitions=False,
    cycles=lambda i: 150 + i.src[0].free_size * i.src[0].shape[0], rules=_no_psum,
    note="over the partition axis: slow, no published cost; a ones-matmul is faster",
)  # fmt: skip


def tensor_partition_reduce(op: Any, data: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Reduce the partition axis: [P, F...] -> [1, F...]; add, max, bitwise_or, bitwise_and."""
    source = isa.tile(data, "tensor_partition_reduce")
    name = operators.name_of(op)
    allowed = ("add", "maximum", "bitwise_or", "bitwise_and")
    if name not in allowed:
        raise refuse(
            "sim_reduce_operator",
            f"tensor_partition_reduce with operator '{name}', expected one of {', '.join(allowed)}",
        )
    attrs = {"op": name, "ndim": source.ndim, **isa._domain(name, (source,))}
    dt = source.dt if dtype is None else to_dtype(dtype)
    shape, axes = (1, *source.shape[1:]), (None, *range(1, source.ndim))
    return _fresh(PARTITION_REDUCE, shape, dt, (source,), attrs, mask, axes)


# --- copies with a run-time offset or predicate ---------------------------------------------------
def _dynamic_cycles(i: Instruction) -> float:
    return max(DYNAMIC_OFFSET_CYCLES, i.dst[0].free_size)


DYNAMIC_SRC = define(
    "tensor_copy_dynamic_src", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="copy",
    compute=table._same, cycles=_dynamic_cycles, indirect=True,
    note="source offset read from SBUF at run time; about 600 cycles",
)  # fmt: skip
DYNAMIC_DST = define(
    "tensor_copy_dynamic_dst", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="copy",
    compute=table._same, cycles=_dynamic_cycles, indirect=True,
    note="SDK 2.22: destination offset read from SBUF at run time",
)  # fmt: skip


def tensor_copy_dynamic_src(src: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Copy whose source offset is data: ``t[i_p, offset[0, k] + i_f]`` @ SBUF|PSUM.

    ``offset`` is an integer tile in SBUF; the index must stay inside of its axis at run time.
    """
    data = isa.tile(src, "tensor_copy_dynamic_src")
    dt = data.dt if dtype is None else to_dtype(dtype)
    attrs = {"raw": True} if dt is data.dt else {}
    tracer = trace.current("nisa.tensor_copy_dynamic_src")
    return tracer.result(DYNAMIC_SRC, data.shape, dt, (data,), attrs, mask)


def tensor_copy_dynamic_dst(*, dst: Any, src: Any, mask: Any = None, dtype: Any = None) -> None:
    """Copy to a destination whose offset is data (SDK 2.22); ``dtype`` is dst's."""
    _newer("tensor_copy_dynamic_dst", "2.22")
    target, data = (
        isa.tile(dst, "tensor_copy_dynamic_dst"),
        isa.tile(src, "tensor_copy_dynamic_dst"),
    )
    _same_shape("tensor_copy_dynamic_dst", target, data)
    attrs = {"raw": True} if target.dt is data.dt else {}
    _into(DYNAMIC_DST, target, (data,), attrs, mask)


def _predicated(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    chosen = xs[0].to(torch.int64) != 0
    return torch.where(~chosen if attrs.get("reverse") else chosen, xs[1], xs[2])


def _predicated_cycles(i: Instruction) -> float:
    n = i.dst[0].free_size
    one_psum = PSUM in (i.src[0].storage.buffer, i.src[1].storage.buffer)
    return max(MIN_II, n if one_psum else 2 * n)


COPY_PREDICATED = define(
    "tensor_copy_predicated", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP,
    flow="elementwise", compute=_predicated, cycles=_predicated_cycles, rules=_two_tensors_rules,
    note="SDK 2.22: copies where an integer predicate is nonzero, keeps the rest",
)  # fmt: skip


def tensor_copy_predicated(
    *, src: Any, dst: Any, predicate: Any, mask: Any = None, dtype: Any = None,
    reverse_pred: bool = False,
) -> None:  # fmt: skip
    """``dst`` = ``src`` (a tile or a number) where ``predicate`` (uint8/16/32) is nonzero, else
    unchanged (SDK 2.22)."""
    _newer("tensor_copy_predicated", "2.22")
    target = isa.tile(dst, "tensor_copy_predicated")
    if isinstance(src, (int, float, np.number)):
        src = isa.memset(target.shape, src, target.dtype)
    data = isa.tile(src, "tensor_copy_predicated")
    choice = isa.tile(predicate, "tensor_copy_predicated")
    _same_shape("tensor_copy_predicated", target, data, choice)
    if data.dt is not target.dt or choice.dt.kind != "u":
        raise refuse(
            "sim_predicated_types",
            f"tensor_copy_predicated got src {data.dt}, dst {target.dt}, predicate {choice.dt}, "
            "expected one type for src and dst and an unsigned predicate; cast first",
        )
    attrs: dict[str, Any] = {"raw": True}
    if reverse_pred:
        attrs["reverse"] = True
    _into(COPY_PREDICATED, target, (choice, data, target), attrs, mask)


def _select_reduce(attrs: dict[str, Any], xs: list[torch.Tensor]) -> Any:
    chosen = xs[0] != 0
    other = xs[2] if len(xs) > 2 else torch.tensor(attrs["on_false"], dtype=xs[1].dtype)
    values = torch.where(~chosen if attrs.get("reverse") else chosen, xs[1], other)
    if "reduce_axes" not in attrs:
        return values
    total = table.reduce_last("maximum", values, attrs["reduce_axes"])
    return values, total.reshape(*total.shape, *attrs["reduce_pad"])


SELECT_REDUCE = define(
    "select_reduce", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="elementwise",
    compute=_select_reduce, cycles=streaming(2.0, MIN_II),
    note="SDK 2.26: select by predicate, optionally the row maximum",
)  # fmt: skip


def select_reduce(
    *, dst: Any, predicate: Any, on_true: Any, on_false: Any, reduce_res: Any = None,
    reduce_cmd: Any = isa.reduce_cmd.idle, reduce_op: Any = np.max, reverse_pred: bool = False,
    mask: Any = None, dtype: Any = None,
) -> None:  # fmt: skip
    """``dst`` = ``on_true`` where ``predicate`` else ``on_false`` (number or [P, 1]) (SDK 2.26).

    With ``reduce_cmd=reset_reduce``, ``reduce_res`` [P, 1] receives the maximum over the free axes.
    """
    _newer("select_reduce", "2.26")
    target, data = isa.tile(dst, "select_reduce"), isa.tile(on_true, "select_reduce")
    choice = _rows_only(isa.tile(predicate, "select_reduce"), mask, "select_reduce")
    if mask is not None:
        target, data = (_rows_only(t, mask, "select_reduce") for t in (target, data))
    _same_shape("select_reduce", target, data, choice)
    src = [choice, data]
    attrs: dict[str, Any] = {}
    if isinstance(on_false, Tensor):
        src.append(isa.vector(on_false, data, "on_false"))
    else:
        attrs["on_false"] = float(on_false)
    if reverse_pred:
        attrs["reverse"] = True
    results: tuple[Tensor, ...] = (target,)
    if reduce_res is not None:
        resets = reduce_cmd is isa.reduce_cmd.reset_reduce
        if operators.name_of(reduce_op) != "maximum" or not resets:
            raise refuse(
                "sim_select_reduce_command",
                f"select_reduce with {reduce_op} and {reduce_cmd}, expected np.max and "
                "reduce_cmd.reset_reduce on this core; reduce with nisa.tensor_reduce",
            )
        total = isa.tile(reduce_res, "select_reduce")
        attrs |= {"reduce_axes": data.ndim - 1, "reduce_pad": (1,) * (total.ndim - 1)}
        results = (target, total)
    trace.current("nisa.select_reduce").emit(SELECT_REDUCE, results, tuple(src), attrs)
    isa.note_written(target)


# --- search of the eight largest ------------------------------------------------------------------
def _max8(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    return _flat(xs[0], attrs["free_axes"]).topk(8, dim=-1).values


def _find8(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    data, values = _flat(xs[0], attrs["free_axes"]), _flat(xs[1], attrs["value_axes"])
    return (data[..., None, :] == values[..., None]).to(torch.uint8).argmax(-1).to(torch.float32)


def _replace8(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    """Each value in turn replaces its first occurrence that is left."""
    data, values = _flat(xs[0], attrs["free_axes"]).clone(), _flat(xs[1], attrs["value_axes"])
    left = torch.ones_like(data, dtype=torch.bool)
    for k in range(8):
        hit = (data == values[..., k : k + 1]) & left
        at = hit.to(torch.uint8).argmax(-1, keepdim=True)
        found = hit.gather(-1, at)
        data.scatter_(-1, at, torch.where(found, attrs["imm"], data.gather(-1, at)))
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


def _define_search(name: str, compute: Callable, note: str) -> table.OpSpec:
    return define(
        name, engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="all", compute=compute,
        cycles=lambda i: max(MIN_II, i.src[0].free_size), rules=_search_rules, note=note,
    )  # fmt: skip


MAX8 = _define_search("max8", _max8, "SDK 2.22: the 8 largest per partition, descending")
FIND8 = _define_search("nc_find_index8", _find8, "SDK 2.22: first index of each of 8 values")
REPLACE8 = _define_search(
    "nc_match_replace8", _replace8, "SDK 2.22: replaces the first occurrence of each of 8 values"
)


def max8(*, src: Any, mask: Any = None, dtype: Any = None) -> Tensor:
    """The 8 largest elements of each partition, descending: [P, F...] -> [P, 8] (SDK 2.22)."""
    _newer("max8", "2.22")
    data = isa.tile(src, "max8")
    dt = data.dt if dtype is None else to_dtype(dtype)
    attrs = {"free_axes": data.ndim - 1}
    return _fresh(MAX8, (data.shape[0], 8), dt, (data,), attrs, mask, (0, None))


def nc_find_index8(*, data: Any, vals: Any, mask: Any = None, dtype: Any = np.uint32) -> Tensor:
    """First index in each partition of ``data`` of each of ``vals`` [P, 8] -> [P, 8] (SDK 2.22).

    A value that does not occur has no defined index on the device; it gives 0 here.
    """
    _newer("nc_find_index8", "2.22")
    source = isa.tile(data, "nc_find_index8")
    values = isa.tile(vals, "nc_find_index8")
    attrs = {"free_axes": source.ndim - 1, "value_axes": values.ndim - 1}
    shape = (source.shape[0], 8)
    return _fresh(FIND8, shape, to_dtype(dtype), (source, values), attrs, mask, (0, None))


def nc_match_replace8(
    *, data: Any, vals: Any, imm: float, dst_idx: Any = None, mask: Any = None, dtype: Any = None
) -> Tensor:
    """``data`` with the first occurrence of each of ``vals`` [P, 8] replaced by ``imm`` (SDK 2.22).

    ``dst_idx`` [P, 8] (SDK 2.24) receives the indices of those first occurrences.
    """
    _newer("nc_match_replace8", "2.22")
    source = isa.tile(data, "nc_match_replace8")
    values = isa.tile(vals, "nc_match_replace8")
    attrs: dict[str, Any] = {"free_axes": source.ndim - 1, "value_axes": values.ndim - 1}
    if dst_idx is not None:
        found = nc_find_index8(data=source, vals=values, mask=mask, dtype=dst_idx.dtype)
        trace.current("nisa.nc_match_replace8").assign(
            isa.tile(dst_idx, "nc_match_replace8"), found
        )
    dt = source.dt if dtype is None else to_dtype(dtype)
    attrs["imm"] = float(imm)
    axes = tuple(range(source.ndim))
    return _fresh(REPLACE8, source.shape, dt, (source, values), attrs, mask, axes)


# --- shuffles and gathers -------------------------------------------------------------------------
def _shuffle(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    axis = xs[0].ndim - attrs["ndim"]
    lanes = np.array(attrs["lanes"])
    rows = np.arange(xs[0].shape[axis])
    picked = lanes[rows % SHUFFLE_LANES]
    keep = picked == KEEP_LANE
    source = torch.as_tensor(np.where(keep, rows, rows - rows % SHUFFLE_LANES + picked))
    moved = xs[0].index_select(axis, source)
    if not keep.any():
        return moved
    column = torch.as_tensor(keep).reshape(-1, *(1,) * (attrs["ndim"] - 1))
    return torch.where(column, xs[1], moved)


def _shuffle_rules(i: Instruction) -> None:
    rows = i.src[0].shape[0]
    if rows % SHUFFLE_LANES:
        raise refuse(
            "sim_shuffle_partitions",
            f"nc_stream_shuffle of {i.src[0].label()}, expected 32, 64, 96 or 128 partitions; pad "
            "the tile",
        )


STREAM_SHUFFLE = define(
    "nc_stream_shuffle", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="lanes",
    compute=_shuffle, cycles=streaming(), rules=_shuffle_rules,
    note="SDK 2.22: permutes partitions inside each quadrant of 32",
)  # fmt: skip


def nc_stream_shuffle(
    src: Any, dst: Any, shuffle_mask: Any, *, dtype: Any = None, mask: Any = None
) -> None:
    """In each quadrant of 32 partitions, partition i of ``dst`` = partition ``shuffle_mask[i]`` of
    ``src``; 255 leaves it as it is (SDK 2.22). Equal shapes [32 k, F...] @ SBUF|PSUM."""
    _newer("nc_stream_shuffle", "2.22")
    data, target = isa.tile(src, "nc_stream_shuffle"), isa.tile(dst, "nc_stream_shuffle")
    _same_shape("nc_stream_shuffle", target, data)
    lanes = tuple(int(k) for k in shuffle_mask)
    if len(lanes) != SHUFFLE_LANES or any(k != KEEP_LANE and not 0 <= k < 32 for k in lanes):
        raise refuse(
            "sim_shuffle_mask",
            f"nc_stream_shuffle mask {lanes}, expected 32 numbers from 0 to 31 or 255",
        )
    views = (data, target) if KEEP_LANE in lanes else (data,)
    attrs: dict[str, Any] = {"lanes": lanes, "ndim": data.ndim}
    if target.dt is data.dt:
        attrs["raw"] = True
    _into(STREAM_SHUFFLE, target, views, attrs, mask)


def _out_of_row(what: str, index: torch.Tensor, size: int) -> None:
    if bool(((index < 0) | (index >= size)).any()):
        raise refuse(
            "err_tensor_access_out_of_bound",
            f"{what} with index {int(index.max())}, expected 0 to {size - 1}; correct the indices",
        )


def _local_gather(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    data, index = _flat(xs[0], attrs["free_axes"]), xs[1].to(torch.int64)
    lead, rows, n = data.shape[:-2], data.shape[-2], data.shape[-1]
    cores, each = rows // GEN2.gpsimd_partitions, GEN2.gpsimd_partitions
    lists = index.reshape(*lead, cores, each, -1).transpose(-1, -2).reshape(*lead, cores, -1)
    lists = lists[..., : attrs["count"]]
    at = (lists[..., None] + torch.arange(attrs["width"])).flatten(-2)
    _out_of_row("local_gather", at, n)
    grouped = data.reshape(*lead, cores, each, n)
    picked = grouped.gather(-1, at[..., None, :].expand(*lead, cores, each, at.shape[-1]))
    return picked.reshape(*lead, rows, attrs["count"], attrs["width"])


def _local_gather_cycles(i: Instruction) -> float:
    count, width = i.attrs["count"], i.attrs["width"]
    per_word = min(4 / i.src[0].dt.itemsize, width)
    constant = ((28 + 4 * width) / (4 * width)) / per_word
    return 150 + count * width / constant


LOCAL_GATHER = define(
    "local_gather", engine=Engine.GPSIMD, reads=(SBUF,), writes=(SBUF,), flow="cores",
    compute=_local_gather, cycles=_local_gather_cycles, rules=_no_psum,
    note="each GpSimd core gathers the same free offsets in its 16 partitions",
)  # fmt: skip


def local_gather(
    src_buffer: Any, index: Any, num_elem_per_idx: int = 1, num_valid_indices: int | None = None,
    *, mask: Any = None,
) -> Tensor:  # fmt: skip
    """Gather along the free axis: [P, F...] and uint16 [P, n] -> [P, 16 n, num_elem_per_idx].

    The indices of each 16 partitions, read partition first, serve all 16; P is a multiple of 16.
    Indices are element offsets, already multiplied by ``num_elem_per_idx``.
    """
    data = _rows_only(isa.tile(src_buffer, "local_gather"), mask, "local_gather")
    offsets = isa.tile(index, "local_gather")
    available = GEN2.gpsimd_partitions * offsets.free_size
    count = available if num_valid_indices is None else int(num_valid_indices)
    wrong = None
    if data.shape[0] % GEN2.gpsimd_partitions or data.shape[0] != offsets.shape[0]:
        wrong = "partition counts that are equal multiples of 16"
    elif offsets.dt.name != "uint16":
        wrong = "uint16 indices"
    elif num_elem_per_idx not in GATHER_WIDTHS:
        wrong = f"num_elem_per_idx one of {GATHER_WIDTHS}"
    elif not 0 < count <= min(available, 4096):
        wrong = f"num_valid_indices from 1 to {min(available, 4096)}"
    if wrong:
        raise refuse(
            "sim_local_gather",
            f"local_gather of {data.label()} with {offsets.label()}, num_elem_per_idx="
            f"{num_elem_per_idx}, num_valid_indices={count}, expected {wrong}; correct it",
        )
    attrs = {"free_axes": data.ndim - 1, "count": count, "width": int(num_elem_per_idx)}
    shape = (data.shape[0], count, int(num_elem_per_idx))
    return _fresh(LOCAL_GATHER, shape, data.dt, (data, offsets), attrs)


def _gather(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    data = _flat(xs[0], attrs["free_axes"])
    index = _flat(xs[1].to(torch.int64), attrs["index_axes"])
    _out_of_row("gather_flattened", index, data.shape[-1])
    return data.gather(-1, index).reshape(xs[1].shape)


GATHER = define(
    "gather_flattened", engine=Engine.GPSIMD, reads=(SBUF,), writes=(SBUF,), flow="all",
    compute=_gather, cycles=lambda i: 150 + i.dst[0].free_size, rules=_no_psum,
    note="nl.gather_flattened (SDK 2.24): own indices for each partition",
)  # fmt: skip


def gather_flattened(data: Any, indices: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """``data`` [P, F...] read at ``indices`` (unsigned, [P, N...]) of its flattened free axes."""
    _newer("gather_flattened", "2.24")
    source = isa.tile(data, "gather_flattened")
    index = isa.tile(indices, "gather_flattened")
    if index.dt is not UINT32:
        raise refuse(
            "sim_gather_index_type",
            f"gather_flattened indices {index.label()}, expected uint32; cast them",
        )
    attrs = {"free_axes": source.ndim - 1, "index_axes": index.ndim - 1}
    dt = source.dt if dtype is None else to_dtype(dtype)
    axes = (0, *(None for _ in index.shape[1:]))
    return _fresh(GATHER, index.shape, dt, (source, index), attrs, mask, axes)


def _bounds(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    ids = xs[0][..., 0, :]
    n = ids.shape[-1]
    place = torch.arange(n, dtype=torch.float32).expand(ids.shape)
    change = torch.ones_like(ids, dtype=torch.bool)
    change[..., 1:] = ids[..., 1:] != ids[..., :-1]
    start = torch.where(change, place, 0.0).cummax(-1).values
    last = torch.ones_like(change)
    last[..., :-1] = change[..., 1:]
    end = torch.where(last, place + 1, float(n)).flip(-1).cummin(-1).values.flip(-1)
    padding = ids == 0
    start, end = torch.where(padding, float(n), start), torch.where(padding, -1.0, end)
    return torch.stack([start, end], -2)[..., None, :, :]


SEQUENCE_BOUNDS = define(
    "sequence_bounds", engine=Engine.GPSIMD, reads=(SBUF,), writes=(SBUF,), flow="all",
    compute=_bounds, cycles=lambda i: 150 + 2 * i.src[0].free_size, rules=_no_psum,
    note="SDK 2.26: start and end of the segment that each element belongs to",
)  # fmt: skip


def sequence_bounds(*, segment_ids: Any, dtype: Any = None) -> Tensor:
    """Segment ids [1, n] -> [1, 2, n]: first index and end (exclusive) of each element's segment.

    Id 0 is padding: start n, end -1 (SDK 2.26). Types fp32 or int32.
    """
    _newer("sequence_bounds", "2.26")
    ids = isa.tile(segment_ids, "sequence_bounds")
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.dt.name not in ("float32", "int32"):
        raise refuse(
            "sim_sequence_bounds",
            f"sequence_bounds got {ids.label()}, expected fp32 or int32 of shape (1, n); reshape",
        )
    dt = ids.dt if dtype is None else to_dtype(dtype)
    return _fresh(SEQUENCE_BOUNDS, (1, 2, ids.shape[1]), dt, (ids,), {})


# --- random numbers -------------------------------------------------------------------------------
def _uniform(attrs: dict[str, Any], seed: torch.Tensor | None, shape: Any) -> torch.Tensor:
    """Uniform [0, 1): the same for the same seed and position in the kernel."""
    number = attrs["seed"] if seed is None else int(seed.reshape(-1)[0])
    generator = torch.Generator().manual_seed((number << 20) + attrs["count"])
    return torch.rand(shape, generator=generator)


def _random_source(tracer: trace.Tracer) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Seed operand (if the seed is data) and attributes of the next random instruction."""
    seed, count = tracer.random
    tracer.random = (seed, count + 1)
    if isinstance(seed, Tensor):
        return (seed,), {"count": count}
    return (), {"seed": seed, "count": count}


def _rand(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    return _uniform(attrs, xs[0] if xs else None, attrs["shape"])


RAND = define(
    "rand", engine=Engine.GPSIMD, reads=ON_CHIP, writes=(SBUF,), flow="random", compute=_rand,
    cycles=lambda i: 150 + i.dst[0].free_size, same_partitions=False,
    note="nl.rand: uniform in [0, 1), reproducible from the seed",
)  # fmt: skip


def rand(shape: Any, dtype: Any = np.float32) -> Tensor:
    """Tile of uniform numbers in [0, 1); the same in every run, new ones in every call."""
    tracer = trace.current("nl.rand")
    size = tuple(int(s) for s in shape)
    src, attrs = _random_source(tracer)
    return _fresh(RAND, size, to_dtype(dtype), src, {**attrs, "shape": size})


def random_seed(seed: Any, *, mask: Any = None) -> None:
    """Seed of the random instructions that follow: a number or a (1, 1) integer tile."""
    tracer = trace.current("nl.random_seed")
    if trace.region(mask, (1, 1)) is trace.EMPTY:
        return
    if isinstance(seed, Tensor):
        tracer.random = (seed[0:1, 0:1], 0)
    elif is_integer(seed):
        tracer.random = (int(seed), 0)
    else:
        raise refuse(
            "sim_random_seed",
            f"random_seed got {type(seed).__name__}, expected an integer or an integer tile",
        )


def _dropout(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    seed = xs[attrs["seed_at"]] if "seed_at" in attrs else None
    probability = xs[attrs["prob_at"]] if "prob_at" in attrs else attrs["prob"]
    return torch.where(_uniform(attrs, seed, xs[0].shape) < probability, 0.0, xs[0])


DROPOUT = define(
    "dropout", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="dropout",
    compute=_dropout, cycles=streaming(), same_partitions=False,
    note="zeroes elements with a probability, without rescaling the others",
)  # fmt: skip


def dropout(data: Any, prob: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """``data`` with elements set to zero with probability ``prob`` (a number or [P, 1])."""
    source = isa.tile(data, "dropout")
    src = [source]
    attrs: dict[str, Any] = {}
    if isinstance(prob, Tensor):
        if source.dt.is_int and prob.dt is not FLOAT32:
            raise refuse(
                "sim_dropout_types",
                f"dropout of {source.label()} with probabilities {prob.label()}, expected fp32 "
                "probabilities for integer data; cast them",
            )
        attrs["prob_at"] = 1
        src.append(isa.vector(prob, source, "prob"))
    else:
        attrs["prob"] = float(prob)
    tracer = trace.current("nisa.dropout")
    seed, state = _random_source(tracer)
    if seed:
        attrs["seed_at"] = len(src)
        src += seed
    dt = source.dt if dtype is None else to_dtype(dtype)
    cut = trace.region(mask, source.shape) if mask is not None else None
    made = tracer.storage(source.shape, dt, SBUF)
    out = Tensor.whole(made)
    if cut is trace.EMPTY:
        return out
    dst = out
    if isinstance(cut, tuple):
        dst = out.slice_box(cut)
        src = [s if s.shape != source.shape else s.slice_box(cut) for s in src]
    elif cut is not None:
        attrs["mask"] = cut
    made.producer = tracer.emit(DROPOUT, (dst,), tuple(src), {**attrs, **state})
    return out


# --- DMA and what this core does not have ---------------------------------------------------------
TRANSPOSED_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def dma_transpose(src: Any, *, axes: Any = None, mask: Any = None, dtype: Any = None) -> Tensor:
    """Transpose by DMA into a new SBUF tile: 2-D [1, 0], 3-D [2, 1, 0], 4-D [3, 1, 2, 0].

    ``src`` @ HBM|SBUF. Element-granular descriptors: very slow on this core.
    """
    source = isa.tile(src, "dma_transpose")
    order = TRANSPOSED_AXES.get(source.ndim)
    if order is None or (axes is not None and tuple(axes) != order):
        raise refuse(
            "sim_dma_transpose_axes",
            f"dma_transpose of {source.label()} with axes {axes}, expected 2 to 4 axes and the "
            f"order {order or list(TRANSPOSED_AXES.values())}",
        )
    dt = source.dt if dtype is None else to_dtype(dtype)
    attrs: dict[str, Any] = {"axes_order": order} | ({"raw": True} if dt is source.dt else {})
    shape = tuple(source.shape[a] for a in order)
    if shape[0] > GEN2.partitions:
        raise refuse(
            "err_num_partition_exceed_arch_limit",
            f"Size of partition dimension {shape[0]} exceeds architecture limitation of "
            f"{GEN2.partitions} in dma_transpose of {source.label()}; transpose in blocks",
        )
    return _fresh(table.DMA_TRANSPOSE, shape, dt, (source,), attrs, mask, order)


def range_select(**_: Any) -> Tensor:
    """An instruction of NeuronCore-v3 only."""
    raise refuse(
        "sim_newer_core",
        "range_select runs on NeuronCore-v3 and newer, expected instructions of NeuronCore-v2; "
        "use nisa.affine_select, or compare and nl.where",
    )


def builtin_custom_op(*_: Any, **__: Any) -> Tensor:
    """Calls a compiled GpSimdE program, whose format is not public."""
    raise NotImplementedError(
        "nki.isa.builtin_custom_op runs a compiled GpSimdE program, whose format is not public"
    )


__all__ = [
    "builtin_custom_op", "dma_transpose", "dropout", "gather_flattened", "local_gather",
    "max8", "nc_find_index8", "nc_match_replace8", "nc_stream_shuffle", "rand", "random_seed",
    "range_select", "scalar_tensor_tensor", "select_reduce", "sequence_bounds",
    "tensor_copy_dynamic_dst", "tensor_copy_dynamic_src", "tensor_copy_predicated",
    "tensor_partition_reduce",
]  # fmt: skip
