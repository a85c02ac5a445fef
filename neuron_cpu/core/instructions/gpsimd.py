"""GpSimdE: index patterns, reductions over partitions, gathers, random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..device.dtypes import FLOAT32, UINT32, DType, to_dtype
from ..device.errors import refuse, warn
from ..device.spec import GEN2, Engine
from ..program import trace
from ..program.index import Index, Mask, is_integer
from ..program.program import Instruction
from ..program.subscript import subscript
from ..program.view import View
from . import operators
from .alu import reduce_last
from .arguments import domain, flatten_free, newer, rows_only, stretched, tile
from .copies import tensor_copy
from .entry import ON_CHIP, SBUF, define, free_elements, refuse_psum, streaming
from .recorder import record_fresh


def _no_psum_rules(i: Instruction) -> None:
    refuse_psum(i, f"{i.op.name} on GpSimdE")


def _iota(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.as_tensor(attrs["values"].copy())


IOTA = define(
    "iota", engine=Engine.GPSIMD, reads=(), writes=(SBUF,), flow="fill", compute=_iota,
    cycles=lambda i: 150 + i.dst[0].free_size, note="affine expression of aranges, int32 inside",
)  # fmt: skip


def iota(expr: Any, dtype: Any, *, mask: Any = None) -> View:
    """Tile with the values of an affine index expression (int32 inside, then cast); GpSimdE."""
    if not isinstance(expr, Index) or expr.ndim < 2:
        raise refuse(
            "sim_iota_expression",
            f"iota got {expr!r}, expected an index expression of at least two axes such as "
            "nl.arange(n)[None, :]",
        )
    tracer = trace.current("nisa.iota")
    attrs = {"values": expr.values()}
    return tracer.result(IOTA, expr.shape, to_dtype(dtype), (), attrs, mask)


def _affine_select(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    keep = torch.as_tensor(attrs["keep"].copy())
    return torch.where(keep, xs[0], torch.tensor(attrs["on_false"], dtype=xs[0].dtype))


AFFINE_SELECT = define(
    "affine_select", engine=Engine.GPSIMD, reads=(SBUF,), writes=(SBUF,), flow="elementwise",
    compute=_affine_select, cycles=lambda i: 150 + free_elements(i),
    note="keeps elements where an affine comparison holds, else a constant",
)  # fmt: skip


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
    attrs = {"keep": keep, "on_false": float(on_false_value)}
    dt: DType = source.dt if dtype is None else to_dtype(dtype)
    tracer = trace.current("nisa.affine_select")
    if source.storage.buffer == "psum":
        warn(
            "sim_gpsimd_psum",
            f"affine_select reads {source.label()}: GpSimdE has no PSUM port, the compiler adds a "
            "copy to SBUF; copy it explicitly",
        )
        source = tensor_copy(source)
    return tracer.result(AFFINE_SELECT, source.shape, dt, (source,), attrs, mask)


def _partition_reduce(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    x = xs[0].movedim(-attrs["ndim"], -1)
    return reduce_last(attrs["op"], x, 1).unsqueeze(-attrs["ndim"])


PARTITION_REDUCE = define(
    "tensor_partition_reduce", engine=Engine.GPSIMD, reads=(SBUF,), writes=(SBUF,),
    flow="partitions", compute=_partition_reduce, same_partitions=False,
    cycles=lambda i: 150 + i.src[0].free_size * i.src[0].shape[0], rules=_no_psum_rules,
    note="over the partition axis: slow, no published cost; a ones-matmul is faster",
)  # fmt: skip


def tensor_partition_reduce(op: Any, data: Any, *, mask: Any = None, dtype: Any = None) -> View:
    """Reduce the partition axis: [P, F...] -> [1, F...]; add, max, bitwise_or, bitwise_and."""
    source = tile(data, "tensor_partition_reduce")
    name = operators.name_of(op)
    allowed = ("add", "maximum", "bitwise_or", "bitwise_and")
    if name not in allowed:
        raise refuse(
            "sim_reduce_operator",
            f"tensor_partition_reduce with operator '{name}', expected one of {', '.join(allowed)}",
        )
    attrs = {"op": name, "ndim": source.ndim, **domain(name, (source,))}
    dt = source.dt if dtype is None else to_dtype(dtype)
    shape, axes = (1, *source.shape[1:]), (None, *range(1, source.ndim))
    return record_fresh(PARTITION_REDUCE, shape, dt, (source,), attrs, mask, axes)


GATHER_WIDTHS = (1, 2, 4, 8, 16, 32)


def _out_of_row(what: str, index: torch.Tensor, size: int) -> None:
    if bool(((index < 0) | (index >= size)).any()):
        raise refuse(
            "err_tensor_access_out_of_bound",
            f"{what} with index {int(index.max())}, expected 0 to {size - 1}; correct the indices",
        )


def _local_gather(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    data, index = flatten_free(xs[0], attrs["free_axes"]), xs[1].to(torch.int64)
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
    compute=_local_gather, cycles=_local_gather_cycles, rules=_no_psum_rules,
    note="each GpSimd core gathers the same free offsets in its 16 partitions",
)  # fmt: skip


def local_gather(
    src_buffer: Any, index: Any, num_elem_per_idx: int = 1, num_valid_indices: int | None = None,
    *, mask: Any = None,
) -> View:  # fmt: skip
    """Gather along the free axis: [P, F...] and uint16 [P, n] -> [P, 16 n, num_elem_per_idx].

    The indices of each 16 partitions, read partition first, serve all 16; P is a multiple of 16.
    Indices are element offsets, already multiplied by ``num_elem_per_idx``.
    """
    data = rows_only(tile(src_buffer, "local_gather"), mask, "local_gather")
    offsets = tile(index, "local_gather")
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
    return record_fresh(LOCAL_GATHER, shape, data.dt, (data, offsets), attrs)


def _gather(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    data = flatten_free(xs[0], attrs["free_axes"])
    index = flatten_free(xs[1].to(torch.int64), attrs["index_axes"])
    _out_of_row("gather_flattened", index, data.shape[-1])
    return data.gather(-1, index).reshape(xs[1].shape)


GATHER = define(
    "gather_flattened", engine=Engine.GPSIMD, reads=(SBUF,), writes=(SBUF,), flow="all",
    compute=_gather, cycles=lambda i: 150 + i.dst[0].free_size, rules=_no_psum_rules,
    note="nl.gather_flattened (SDK 2.24): own indices for each partition",
)  # fmt: skip


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
    attrs = {"free_axes": source.ndim - 1, "index_axes": index.ndim - 1}
    dt = source.dt if dtype is None else to_dtype(dtype)
    axes = (0, *(None for _ in index.shape[1:]))
    return record_fresh(GATHER, index.shape, dt, (source, index), attrs, mask, axes)


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
    compute=_bounds, cycles=lambda i: 150 + 2 * i.src[0].free_size, rules=_no_psum_rules,
    note="SDK 2.26: start and end of the segment that each element belongs to",
)  # fmt: skip


def sequence_bounds(*, segment_ids: Any, dtype: Any = None) -> View:
    """Segment ids [1, n] -> [1, 2, n]: first index and end (exclusive) of each element's segment.

    Id 0 is padding: start n, end -1 (SDK 2.26). Types fp32 or int32.
    """
    newer("sequence_bounds", "2.26")
    ids = tile(segment_ids, "sequence_bounds")
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.dt.name not in ("float32", "int32"):
        raise refuse(
            "sim_sequence_bounds",
            f"sequence_bounds got {ids.label()}, expected fp32 or int32 of shape (1, n); reshape",
        )
    dt = ids.dt if dtype is None else to_dtype(dtype)
    return record_fresh(SEQUENCE_BOUNDS, (1, 2, ids.shape[1]), dt, (ids,), {})


def _uniform(attrs: dict[str, Any], seed: torch.Tensor | None, shape: Any) -> torch.Tensor:
    """Uniform [0, 1): the same for the same seed and position in the kernel."""
    number = attrs["seed"] if seed is None else int(seed.reshape(-1)[0])
    generator = torch.Generator().manual_seed((number << 20) + attrs["count"])
    return torch.rand(shape, generator=generator)


def _random_source(tracer: trace.Tracer) -> tuple[tuple[View, ...], dict[str, Any]]:
    """Seed operand (if the seed is data) and attributes of the next random instruction."""
    seed, count = tracer.random
    tracer.random = (seed, count + 1)
    if isinstance(seed, View):
        return (seed,), {"count": count}
    return (), {"seed": seed, "count": count}


def _rand(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    return _uniform(attrs, xs[0] if xs else None, attrs["shape"])


RAND = define(
    "rand", engine=Engine.GPSIMD, reads=ON_CHIP, writes=(SBUF,), flow="random", compute=_rand,
    cycles=lambda i: 150 + i.dst[0].free_size, same_partitions=False,
    note="nl.rand: uniform in [0, 1), reproducible from the seed",
)  # fmt: skip


def rand(shape: Any, dtype: Any = np.float32) -> View:
    """Tile of uniform numbers in [0, 1); the same in every run, new ones in every call."""
    tracer = trace.current("nl.rand")
    size = tuple(int(s) for s in shape)
    src, attrs = _random_source(tracer)
    return record_fresh(RAND, size, to_dtype(dtype), src, {**attrs, "shape": size})


def random_seed(seed: Any, *, mask: Any = None) -> None:
    """Seed of the random instructions that follow: a number or a (1, 1) integer tile."""
    tracer = trace.current("nl.random_seed")
    if trace.region(mask, (1, 1)) is trace.EMPTY:
        return
    if isinstance(seed, View):
        tracer.random = (subscript(seed, (slice(0, 1), slice(0, 1))), 0)
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


def dropout(data: Any, prob: Any, *, mask: Any = None, dtype: Any = None) -> View:
    """``data`` with elements set to zero with probability ``prob`` (a number or [P, 1])."""
    source = tile(data, "dropout")
    src = [source]
    attrs: dict[str, Any] = {}
    if isinstance(prob, View):
        if source.dt.is_int and prob.dt is not FLOAT32:
            raise refuse(
                "sim_dropout_types",
                f"dropout of {source.label()} with probabilities {prob.label()}, expected fp32 "
                "probabilities for integer data; cast them",
            )
        attrs["prob_at"] = 1
        src.append(stretched(prob, source, "prob"))
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
    out = tracer.whole(made)
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


def builtin_custom_op(*_: Any, **__: Any) -> View:
    """Calls a compiled GpSimdE program, whose format is not public."""
    raise NotImplementedError(
        "nki.isa.builtin_custom_op runs a compiled GpSimdE program, whose format is not public"
    )
