"""Instructions that move, fill, choose, search and shuffle elements, on VectorE and its peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..device.dtypes import to_dtype
from ..device.errors import refuse
from ..device.spec import Engine
from ..program import trace
from ..program.program import Instruction
from ..program.storage import Frame, Source, Storage
from ..program.view import View, compose
from . import operators
from .alu import reduce_last
from .arguments import (
    choose_engine,
    flatten_free,
    newer,
    number,
    rows_only,
    same_shape,
    stretched,
    tile,
)
from .constants import reduce_cmd
from .entry import (
    MIN_II,
    ON_CHIP,
    PSUM,
    OpSpec,
    define,
    first_operand,
    free_elements,
    refuse_psum,
    streaming,
    stride_factor,
)
from .recorder import note_written, record_fresh, record_into
from .vector import _two_tensors_rules


def _copy_cycles(i: Instruction) -> float:
    return max(MIN_II, free_elements(i) * stride_factor(i))


def _copy_rules(i: Instruction) -> None:
    if i.attrs.get("engine") is Engine.GPSIMD:
        refuse_psum(i, "tensor_copy on GpSimdE")


TENSOR_COPY = define(
    "tensor_copy", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="copy",
    compute=first_operand, cycles=_copy_cycles, rules=_copy_rules,
    note="bit-exact between equal types on VectorE and GpSimdE, else through fp32",
)  # fmt: skip


def copy_instruction(
    dst: View, src: View, frame: Frame | None, source: Source | None
) -> Instruction:
    """A tensor_copy that is not recorded (for repairs of the instruction list)."""
    attrs = {"raw": True} if src.dt is dst.dt else {}
    return Instruction(TENSOR_COPY, (dst,), (src,), attrs, frame, source)


def copy_into(dst: View, src: View) -> None:
    """Record ``dst <- src`` between on-chip tensors."""
    if not src.storage.on_chip:
        raise refuse(
            "err_unsupported_memory",
            f"{src.label()} is assigned to {dst.label()}, expected a tile in sbuf or psum; load "
            "it with nl.load first",
        )
    attrs = {"raw": True} if src.dt is dst.dt else {}
    trace.current("assignment").emit(TENSOR_COPY, (dst,), (src,), attrs)
    note_written(dst)


def tensor_copy(src: Any, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> View:
    """Copy a tile within SBUF/PSUM; bit-exact unless the type changes.

    ``src`` [P, F...] @ SBUF|PSUM of any type; result alike @ SBUF (PSUM if assigned there).
    """
    data = tile(src, "tensor_copy")
    dt = data.dt if dtype is None else to_dtype(dtype)
    choice = choose_engine(engine, "tensor_copy", (Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD))
    attrs: dict[str, Any] = {"engine": choice} if choice else {}
    if dt is data.dt and choice is not Engine.SCALAR:
        attrs["raw"] = True
    tracer = trace.current("nisa.tensor_copy")
    return tracer.result(TENSOR_COPY, data.shape, dt, (data,), attrs, mask)


def copy_written(source: View, dtype: Any) -> View:
    """SBUF copy of what the instruction that made ``source`` wrote of it, which a mask may cut."""
    producer = source.storage.producer
    if producer is None:
        return source
    if producer.dst[0].shape == source.shape:
        return tensor_copy(source, dtype=dtype)
    written = producer.dst[0]
    tracer = trace.current("copy")
    out = tracer.whole(
        tracer.storage(source.shape, source.dt if dtype is None else to_dtype(dtype), "sbuf")
    )
    target = compose(written, out)
    assert target is not None  # a mask leaves a box
    attrs = {"raw": True} if out.dt is source.dt else {}
    out.storage.producer = tracer.emit(TENSOR_COPY, (target,), (written,), attrs)
    return out


def _fill_cycles(i: Instruction) -> float:
    n = i.dst[0].free_size
    half = i.attrs["value"] == 0 and i.dst[0].dt.itemsize == 2
    return max(MIN_II, n / 2 if half else n)


def _fill(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor(attrs["value"])


MEMSET = define(
    "memset", engine=Engine.VECTOR, reads=(), writes=ON_CHIP, flow="fill", compute=_fill,
    cycles=_fill_cycles, note="N/2 cycles for zeros of 2-byte types",
)  # fmt: skip


def fill(dst: View, value: Any) -> None:
    """Record ``dst[...] = constant``."""
    trace.current("assignment").emit(MEMSET, (dst,), (), {"value": number(value)})
    note_written(dst)


def zero_fill(storage: Storage) -> Instruction:
    """The real memset of a zeros-initialised tensor that is read before a matmul wrote it."""
    whole = View.blocks_last(storage)
    return Instruction(MEMSET, (whole,), (), {"value": 0}, storage.frame, storage.source)


def memset(shape: Any, value: Any, dtype: Any, *, mask: Any = None, engine: Any = None) -> View:
    """New tile of ``shape`` filled with ``value``; VectorE or GpSimdE."""
    attrs: dict[str, Any] = {"value": number(value)}
    choice = choose_engine(engine, "memset", (Engine.VECTOR, Engine.GPSIMD))
    if choice:
        attrs["engine"] = choice
    tracer = trace.current("nisa.memset")
    size = tuple(int(s) for s in shape)
    return tracer.result(MEMSET, size, to_dtype(dtype), (), attrs, mask)


DYNAMIC_OFFSET_CYCLES = 600  # nisa.tensor_copy_dynamic_src: about 600 cycles to read the offset


def _dynamic_cycles(i: Instruction) -> float:
    return max(DYNAMIC_OFFSET_CYCLES, i.dst[0].free_size)


DYNAMIC_SRC = define(
    "tensor_copy_dynamic_src", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="copy",
    compute=first_operand, cycles=_dynamic_cycles, indirect=True,
    note="source offset read from SBUF at run time; about 600 cycles",
)  # fmt: skip
DYNAMIC_DST = define(
    "tensor_copy_dynamic_dst", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="copy",
    compute=first_operand, cycles=_dynamic_cycles, indirect=True,
    note="SDK 2.22: destination offset read from SBUF at run time",
)  # fmt: skip


def tensor_copy_dynamic_src(src: Any, *, mask: Any = None, dtype: Any = None) -> View:
    """Copy whose source offset is data: ``t[i_p, offset[0, k] + i_f]`` @ SBUF|PSUM.

    ``offset`` is an integer tile in SBUF; the index must stay inside of its axis at run time.
    """
    data = tile(src, "tensor_copy_dynamic_src")
    dt = data.dt if dtype is None else to_dtype(dtype)
    attrs = {"raw": True} if dt is data.dt else {}
    tracer = trace.current("nisa.tensor_copy_dynamic_src")
    return tracer.result(DYNAMIC_SRC, data.shape, dt, (data,), attrs, mask)


def tensor_copy_dynamic_dst(*, dst: Any, src: Any, mask: Any = None, dtype: Any = None) -> None:
    """Copy to a destination whose offset is data (SDK 2.22); ``dtype`` is dst's."""
    newer("tensor_copy_dynamic_dst", "2.22")
    target, data = (
        tile(dst, "tensor_copy_dynamic_dst"),
        tile(src, "tensor_copy_dynamic_dst"),
    )
    same_shape("tensor_copy_dynamic_dst", target, data)
    attrs = {"raw": True} if target.dt is data.dt else {}
    record_into(DYNAMIC_DST, target, (data,), attrs, mask)


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
    newer("tensor_copy_predicated", "2.22")
    target = tile(dst, "tensor_copy_predicated")
    if isinstance(src, (int, float, np.number)):
        src = memset(target.shape, src, target.dtype)
    data = tile(src, "tensor_copy_predicated")
    choice = tile(predicate, "tensor_copy_predicated")
    same_shape("tensor_copy_predicated", target, data, choice)
    if data.dt is not target.dt or choice.dt.kind != "u":
        raise refuse(
            "sim_predicated_types",
            f"tensor_copy_predicated got src {data.dt}, dst {target.dt}, predicate {choice.dt}, "
            "expected one type for src and dst and an unsigned predicate; cast first",
        )
    attrs: dict[str, Any] = {"raw": True}
    if reverse_pred:
        attrs["reverse"] = True
    record_into(COPY_PREDICATED, target, (choice, data, target), attrs, mask)


def _select_reduce(attrs: dict[str, Any], xs: list[torch.Tensor]) -> Any:
    chosen = xs[0] != 0
    other = xs[2] if len(xs) > 2 else torch.tensor(attrs["on_false"], dtype=xs[1].dtype)
    values = torch.where(~chosen if attrs.get("reverse") else chosen, xs[1], other)
    if "reduce_axes" not in attrs:
        return values
    total = reduce_last("maximum", values, attrs["reduce_axes"])
    return values, total.reshape(*total.shape, *attrs["reduce_pad"])


SELECT_REDUCE = define(
    "select_reduce", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="elementwise",
    compute=_select_reduce, cycles=streaming(2.0, MIN_II),
    note="SDK 2.26: select by predicate, optionally the row maximum",
)  # fmt: skip


def select_reduce(
    *, dst: Any, predicate: Any, on_true: Any, on_false: Any, reduce_res: Any = None,
    reduce_cmd: Any = reduce_cmd.idle, reduce_op: Any = np.max, reverse_pred: bool = False,
    mask: Any = None, dtype: Any = None,
) -> None:  # fmt: skip
    """``dst`` = ``on_true`` where ``predicate`` else ``on_false`` (number or [P, 1]) (SDK 2.26).

    With ``reduce_cmd=reset_reduce``, ``reduce_res`` [P, 1] receives the maximum over the free axes.
    """
    newer("select_reduce", "2.26")
    target, data = tile(dst, "select_reduce"), tile(on_true, "select_reduce")
    choice = rows_only(tile(predicate, "select_reduce"), mask, "select_reduce")
    if mask is not None:
        target, data = (rows_only(t, mask, "select_reduce") for t in (target, data))
    same_shape("select_reduce", target, data, choice)
    src = [choice, data]
    attrs: dict[str, Any] = {}
    if isinstance(on_false, View):
        src.append(stretched(on_false, data, "on_false"))
    else:
        attrs["on_false"] = float(on_false)
    if reverse_pred:
        attrs["reverse"] = True
    results: tuple[View, ...] = (target,)
    if reduce_res is not None:
        resets = reduce_cmd is reduce_cmd.reset_reduce
        if operators.name_of(reduce_op) != "maximum" or not resets:
            raise refuse(
                "sim_select_reduce_command",
                f"select_reduce with {reduce_op} and {reduce_cmd}, expected np.max and "
                "reduce_cmd.reset_reduce on this core; reduce with nisa.tensor_reduce",
            )
        total = tile(reduce_res, "select_reduce")
        attrs |= {"reduce_axes": data.ndim - 1, "reduce_pad": (1,) * (total.ndim - 1)}
        results = (target, total)
    trace.current("nisa.select_reduce").emit(SELECT_REDUCE, results, tuple(src), attrs)
    note_written(target)


def _select(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    other = xs[2] if len(xs) > 2 else torch.tensor(attrs["on_false"], dtype=xs[1].dtype)
    return torch.where(xs[0] != 0, xs[1], other)


SELECT = define(
    "select", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="elementwise",
    compute=_select, cycles=streaming(2.0),
    note="nl.where: predicate, value if nonzero, value or constant otherwise",
)  # fmt: skip
SHUFFLE_LANES = 32  # partitions of one quadrant
KEEP_LANE = 255  # shuffle mask entry that leaves a partition as it is


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
    newer("nc_stream_shuffle", "2.22")
    data, target = tile(src, "nc_stream_shuffle"), tile(dst, "nc_stream_shuffle")
    same_shape("nc_stream_shuffle", target, data)
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
    record_into(STREAM_SHUFFLE, target, views, attrs, mask)


SEARCH_MIN, SEARCH_MAX = 8, 16384  # elements per partition that max8 and its kin take


def _max8(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    return flatten_free(xs[0], attrs["free_axes"]).topk(8, dim=-1).values


def _find8(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    data, values = flatten_free(xs[0], attrs["free_axes"]), flatten_free(xs[1], attrs["value_axes"])
    return (data[..., None, :] == values[..., None]).to(torch.uint8).argmax(-1).to(torch.float32)


def _replace8(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    """Each value in turn replaces its first occurrence that is left."""
    data = flatten_free(xs[0], attrs["free_axes"]).clone()
    values = flatten_free(xs[1], attrs["value_axes"])
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


def _define_search(name: str, compute: Callable, note: str) -> OpSpec:
    return define(
        name, engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="all", compute=compute,
        cycles=lambda i: max(MIN_II, i.src[0].free_size), rules=_search_rules, note=note,
    )  # fmt: skip


MAX8 = _define_search("max8", _max8, "SDK 2.22: the 8 largest per partition, descending")
FIND8 = _define_search("nc_find_index8", _find8, "SDK 2.22: first index of each of 8 values")
REPLACE8 = _define_search(
    "nc_match_replace8", _replace8, "SDK 2.22: replaces the first occurrence of each of 8 values"
)


def max8(*, src: Any, mask: Any = None, dtype: Any = None) -> View:
    """The 8 largest elements of each partition, descending: [P, F...] -> [P, 8] (SDK 2.22)."""
    newer("max8", "2.22")
    data = tile(src, "max8")
    dt = data.dt if dtype is None else to_dtype(dtype)
    attrs = {"free_axes": data.ndim - 1}
    return record_fresh(MAX8, (data.shape[0], 8), dt, (data,), attrs, mask, (0, None))


def nc_find_index8(*, data: Any, vals: Any, mask: Any = None, dtype: Any = np.uint32) -> View:
    """First index in each partition of ``data`` of each of ``vals`` [P, 8] -> [P, 8] (SDK 2.22).

    A value that does not occur has no defined index on the device; it gives 0 here.
    """
    newer("nc_find_index8", "2.22")
    source = tile(data, "nc_find_index8")
    values = tile(vals, "nc_find_index8")
    attrs = {"free_axes": source.ndim - 1, "value_axes": values.ndim - 1}
    shape = (source.shape[0], 8)
    return record_fresh(FIND8, shape, to_dtype(dtype), (source, values), attrs, mask, (0, None))


def nc_match_replace8(
    *, data: Any, vals: Any, imm: float, dst_idx: Any = None, mask: Any = None, dtype: Any = None
) -> View:
    """``data`` with the first occurrence of each of ``vals`` [P, 8] replaced by ``imm`` (SDK 2.22).

    ``dst_idx`` [P, 8] (SDK 2.24) receives the indices of those first occurrences.
    """
    newer("nc_match_replace8", "2.22")
    source = tile(data, "nc_match_replace8")
    values = tile(vals, "nc_match_replace8")
    attrs: dict[str, Any] = {"free_axes": source.ndim - 1, "value_axes": values.ndim - 1}
    if dst_idx is not None:
        found = nc_find_index8(data=source, vals=values, mask=mask, dtype=dst_idx.dtype)
        dst_idx[...] = found  # as a kernel assigns: the result moves there without a copy
    dt = source.dt if dtype is None else to_dtype(dtype)
    attrs["imm"] = float(imm)
    axes = tuple(range(source.ndim))
    return record_fresh(REPLACE8, source.shape, dt, (source, values), attrs, mask, axes)


def range_select(**_: Any) -> View:
    """An instruction of NeuronCore-v3 only."""
    raise refuse(
        "sim_newer_core",
        "range_select runs on NeuronCore-v3 and newer, expected instructions of NeuronCore-v2; "
        "use nisa.affine_select, or compare and nl.where",
    )
