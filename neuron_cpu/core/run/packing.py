"""Weights of products in their own width: packed once, multiplied by PyTorch's fp32 x fp16 product.

A processor reads bf16 weights faster than it widens them, but PyTorch rounds the results of its
bf16 product. Its product of fp32 rows and packed fp16 weights, which threads share, widens in
registers and accumulates in fp32, so the results are those of fp32 operands in another order of
sums. A bf16 number times a power of two is an fp16 number, but where it is tiny beside the largest
weight: those few are left out of the packed matrix and added on their own.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..device.dtypes import DType
from . import threads
from .memory import Arena, unseen, widen
from .merge import Op, Ref, contiguous

VARIABLE = "NKI_CPU_PACKED_MIB"  # packed weights of a process; 0 packs none
_MIB = 4096
_LEFT_OUT = 64  # weights of a matrix that are added on their own
_PART = 1 << 20  # elements that are looked at at a time, so that copies of them are small
_PIECE = 1 << 22  # elements that are widened at a time
_HALF, _NORMAL = 65504.0, 2.0**-14  # largest and least normal number of fp16
FACTOR = 2.0**-12  # of the rows: packed weights are 2^12 times as large, where that fits fp16
_held: list[int] = []  # bytes of the packed matrices
_lock = threading.Lock()
_PACKET = getattr(torch.ops.quantized, "linear_dynamic_fp16", None)
_LINEAR = _PACKET and _PACKET.default._op  # the packet looks for fake objects in every call
# fp8 is widened 90 times as slowly as its packed product runs, and has no product of PyTorch
PACKED = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
AVAILABLE = _LINEAR is not None and "fbgemm" in torch.backends.quantized.supported_engines


Others = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # (k, n, value) of weights


class Piece(NamedTuple):
    """Some columns of a packed matrix, by where each of them begins in the weight."""

    starts: np.ndarray
    matrix: torch.ScriptObject
    others: Others


class Pack(NamedTuple):
    """A packed matrix [N, K] for rows times ``FACTOR`` times ``more``, in pieces of columns.

    Attributes:
        order: of each column the place in the pieces' results; None where they are in order.
        others: the weights that are added on their own.
    """

    pieces: tuple[torch.ScriptObject, ...]
    order: torch.Tensor | None
    more: float
    others: Others | None


def multiply(
    rows: torch.Tensor, pack: Pack, out: torch.Tensor, seen: tuple[tuple, tuple] | None = None
) -> None:
    """Scaled rows [M, K] times a packed matrix into ``out``, whose axes are those of [M, N] or
    divide them; or others, where ``seen`` is the shape and the strides in which [M, N] has them."""
    run = partial(_multiply, rows, pack, out, seen)
    threads.shared(run)() if rows.shape[1] * out.numel() >= threads.SHARED else run()


def _multiply(
    rows: torch.Tensor, pack: Pack, out: torch.Tensor, seen: tuple[tuple, tuple] | None
) -> None:
    assert _LINEAR is not None
    rows = rows if pack.more == 1.0 else rows * pack.more
    parts = [_LINEAR(rows, matrix) for matrix in pack.pieces]
    made: torch.Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if pack.order is not None:
        made = made.index_select(1, pack.order)
    if pack.others is not None:
        at, to, weights = pack.others
        made.index_add_(1, to, rows[:, at] * weights)
    out.copy_(made.as_strided(*seen) if seen else made.view(out.shape))


def keep_packed(tensor: torch.Tensor) -> None:
    """Promise that nobody writes this tensor any more: kernels may keep it packed.

    Packed matrices live as long as their tensor, and all of a process take at most
    ``NKI_CPU_PACKED_MIB`` (4096): as much as the tensors themselves, twice that of fp8. A write by
    an operator of PyTorch is noticed all the same, but not one by way of numpy.
    """
    if AVAILABLE and tensor.dtype in PACKED and not tensor.is_inference():
        tensor.__dict__.setdefault("kept_packed", {"version": tensor._version})


def held() -> int:
    """Bytes of the packed matrices that this process has made."""
    return sum(_held)


def packs_of(tensor: torch.Tensor) -> dict | None:
    """The packed matrices of a tensor; None where nobody has promised anything."""
    packs: dict | None = tensor.__dict__.get("kept_packed")
    if packs is not None and packs["version"] != tensor._version:
        packs.clear()
        packs["version"] = tensor._version
    return packs


def pack_new(arena: Arena) -> None:
    """Pack the weights that this run is the first to bind, in all threads of the caller: small
    ones, as each thread has copies of a piece, and memory of malloc's (24 MiB more of a 1B model).
    """
    new = [each for key, each in arena.packable.items() if len(arena.packs.get(key, ())) == 1]
    if len(new) > 1 and max(each[0].memory.size for each in new) < _PIECE:
        with _lock:
            threads.at_once(lambda products: [each.pack(arena) for each in products], new)


class Packable:
    """A product whose one operand may be a packed matrix, as [M, K] x [K, N].

    Args:
        weight: which operand, 0 or 1.
        out: the result, with an axis for each free axis of the operands.
    """

    def __init__(self, op: Op, weight: int, out: Ref) -> None:
        b = op.batch
        w, x = op.src[weight], op.src[1 - weight]
        rows, columns, depth = [], [], []  # (size, stride of the operand, stride of the result)
        for axis in range(b):
            sides = w.strides[axis], x.strides[axis]
            if axis in op.contract:
                depth.append((w.shape[axis], *sides))
            elif sides[0]:
                columns.append((w.shape[axis], sides[0], out.strides[axis]))
            else:
                rows.append((x.shape[axis], sides[1], out.strides[axis]))
        depth.append((w.shape[b], w.strides[b], x.strides[b]))
        for ref, axes in ((w, columns), (x, rows)):
            first = b if ref is op.src[0] else b + 1
            axes += list(zip(ref.shape[b + 1 :], ref.strides[b + 1 :], out.strides[first:]))
        depth.sort(key=lambda a: -a[2])  # so that rows need no copy
        for axes in (rows, columns):
            axes.sort(key=lambda a: -a[2])
        self.memory, self.columns, self.depth = w.memory, columns, depth
        self.weight = _view(w, [*(a[:2] for a in columns), *(a[:2] for a in depth)])
        self.key = self.weight.offset, self.weight.shape, self.weight.strides
        self.rows = _view(x, [*(a[:2] for a in rows), *((n, s) for n, _, s in depth)])
        self.out = _view(out, [(n, s) for n, _, s in (*rows, *columns)])
        self.turned_rows = _view(x, [*((n, s) for n, _, s in depth), *(a[:2] for a in rows)])
        self.turned_out = _view(out, [(n, s) for n, _, s in (*columns, *rows)])
        self.sizes = tuple(math.prod(a[0] for a in axes) for axes in (rows, columns, depth))

    @staticmethod
    def of(op: Op, memories: set[int]) -> Packable | None:
        """The form of a product with an operand in these memories; None of other products."""
        out = _by_free_axes(op)
        if out is None:
            return None
        for at, other in ((0, 1), (1, 0)):
            w, x = op.src[at], op.src[other]
            if id(w.memory) not in memories:
                continue
            shared = any(
                s and t
                for axis, (s, t) in enumerate(zip(w.strides[: op.batch], x.strides))
                if axis not in op.contract
            )
            if not shared and w.by_data is None and x.by_data is None and x.memory is not w.memory:
                return Packable(op, at, out)
        return None

    def packed(self, arena: Arena) -> Pack | None:
        """The packed matrix of what is bound in this run."""
        store = arena.packs.get(id(self.memory))
        if store is None:
            return None
        found = store.get(self.key, store)
        if found is store:
            with _lock, unseen():
                return self.pack(arena)
        return found

    def pack(self, arena: Arena) -> Pack | None:
        """The same, while the caller keeps others from this weight."""
        store = arena.packs[id(self.memory)]
        if self.key not in store:
            store[self.key] = self._pack(arena, store)
        return store[self.key]

    def _pack(self, arena: Arena, store: dict) -> Pack | None:
        """The matrix, of pieces that other products have made and of new ones. A piece of which
        it takes a part becomes two for all of them: no column is packed twice."""
        wanted = element_numbers(self.weight.offset, (a[:2] for a in self.columns))
        k = self.sizes[2]
        made: list[Piece] = store.setdefault(("made", *(a[:2] for a in self.depth)), [])
        each, had = np.unique(wanted), [wanted[:0], *(piece.starts for piece in made)]
        if len(each) < len(wanted):  # columns twice
            return None
        new = wanted[~np.isin(wanted, np.concatenate(had))]  # results need no turning then
        if held() + 2 * k * len(new) > int(os.environ.get(VARIABLE, _MIB)) << 20:
            return None
        if "more" not in store:
            _look(arena.of(self.memory), arena.kept(self.weight), store)
        if store["more"] is None:
            return None
        step = max(1, _PIECE // k)
        parts, kept = [new[at : at + step] for at in range(0, len(new), step)], []
        for piece in made:
            apart = piece.starts.max() < each[0] or each[-1] < piece.starts.min()
            own = np.isin(piece.starts, [] if apart else wanted)
            if own.any() and not own.all():
                parts += piece.starts[own], piece.starts[~own]
            else:
                kept.append(piece)
        divided = len(kept) < len(made)
        for starts in parts:
            kept.append(self._piece(arena, store, starts))
            if len(kept[-1].others[0]) > _LEFT_OUT:
                return None
        pack = _joined([p for p in kept if p.starts[0] in wanted], wanted, store["more"])
        if pack.others is not None and len(pack.others[0]) > _LEFT_OUT:
            return None
        if divided:
            for key in [key for key, of in store.items() if isinstance(of, Pack)]:
                del store[key]
        made[:] = kept
        _held.append(2 * k * len(new))
        return pack

    def _piece(self, arena: Arena, store: dict, starts: np.ndarray) -> Piece:
        """The columns that begin at these elements of the weight."""
        at, weight, dt = len(self.columns), self.weight, arena.kept(self.weight)
        shape, strides = (1 + int(starts.max()), *weight.shape[at:]), (1, *weight.strides[at:])
        stored = arena.view(Ref(weight.memory, 0, shape, strides, weight.dt))
        values = stored.index_select(0, torch.from_numpy(starts))
        _let_go(arena.of(self.memory))
        values = widen(values, dt, False).view(len(starts), -1).div_(FACTOR * store["more"])
        none = torch.zeros(0, dtype=torch.int64)
        others = (none, none, torch.zeros(0)) if store["exact"] else _lost(values)
        piece = Piece(starts, torch.ops.quantized.linear_prepack_fp16(values), others)
        large = values.numel() >= _PIECE // 4
        del values
        if large:
            give_back()
        return piece


def _joined(pieces: list[Piece], wanted: np.ndarray, more: float) -> Pack:
    """The matrix of these columns, which are those of the pieces in some order."""
    pieces.sort(key=lambda piece: piece.starts[0])
    starts = np.concatenate([piece.starts for piece in pieces])
    sorter = np.argsort(starts)
    order = sorter[np.searchsorted(starts, wanted, sorter=sorter)]
    places = torch.from_numpy(np.argsort(order))  # of the pieces' columns
    first, others = 0, []
    for piece in pieces:
        ks, ns, values = piece.others
        others.append((ks, places[first + ns], values))
        first += len(piece.starts)
    joined = tuple(map(torch.cat, zip(*others)))
    return Pack(
        tuple(piece.matrix for piece in pieces),
        None if (starts == wanted).all() else torch.from_numpy(order),
        more,
        joined if len(joined[0]) else None,  # type: ignore[arg-type]
    )


def element_numbers(first: int, axes: Iterable[tuple[int, int]]) -> np.ndarray:
    """The element numbers of a view, its axes given as (size, step)."""
    numbers = np.full(1, first)
    for size, step in axes:
        numbers = (numbers[:, None] + np.arange(size) * step).ravel()
    return numbers


def _look(flat: torch.Tensor, dt: DType, store: dict) -> None:
    """Note the rows' factor for a weight, None for one that fp16 does not hold; and whether fp16
    holds each of its numbers: without their sign, bits are in the order of the numbers."""
    bits = flat.reshape(-1).view(torch.uint8 if dt.itemsize == 1 else torch.uint16).numpy()
    most, least = 0, 2 << 16
    for at in range(0, len(bits), _PART):
        part = bits[at : at + _PART] << 1
        most = max(most, int(part.max()))
        least = min(least, int((part - 2).min()) + 2)  # two less: zeros are the largest then
    ends = torch.from_numpy(np.array([most >> 1, least >> 1]).astype(bits.dtype)).view(flat.dtype)
    largest, smallest = widen(ends, dt, False).tolist()
    finite = math.isfinite(largest) and largest > 0
    power = math.ceil(math.log2(largest / FACTOR / _HALF)) if finite else 64
    store["more"] = more = 2.0 ** max(0, power) if power < 64 else None
    store["exact"] = more is not None and smallest >= _NORMAL * FACTOR * more


def _lost(values: torch.Tensor) -> Others:
    """(k, n, value) of the numbers of a matrix [N, K] that fp16 does not hold; zeros in there."""
    rows = max(1, _PART // values.shape[1])
    found = [(part.half().float() != part).nonzero() for part in values.split(rows)]
    wrong = torch.cat([at + at.new_tensor([rows * no, 0]) for no, at in enumerate(found)])
    n, k = wrong.t().contiguous()
    left = values[n, k]
    values[n, k] = 0.0
    return k, n, left


# --- memory that packing leaves -------------------------------------------------------------------
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_DONTNEED = 4  # <asm-generic/mman-common.h>
_PRESENT, _SWAPPED, _OF_A_FILE = 1 << 63, 1 << 62, 1 << 61  # bits of a page: proc_pid_pagemap(5)


def give_back() -> None:
    """Let glibc return what was freed to the system."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)  # type: ignore[union-attr]


def _let_go(weight: torch.Tensor) -> None:
    """Give back pages of a packed weight that a file holds, too: who reads them maps them again."""
    if _LIBC is None:
        return
    first = -(-weight.data_ptr() // mmap.PAGESIZE)
    count = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE - first
    try:
        pages = np.fromfile("/proc/self/pagemap", np.uint64, max(0, count), offset=8 * first)
    except OSError:  # a confined process
        pages = np.zeros(0, np.uint64)
    held = pages & (_PRESENT | _SWAPPED) != 0
    if len(pages) and (pages[held] & _OF_A_FILE != 0).all():  # nobody wrote any of them
        start, length = ctypes.c_void_p(first * mmap.PAGESIZE), count * mmap.PAGESIZE
        _LIBC.madvise(start, ctypes.c_size_t(length), _DONTNEED)


def _by_free_axes(op: Op) -> Ref | None:
    """The result of a product with an axis for each free axis of its operands."""
    b, out = op.batch, op.dst[0]
    if len(op.src) != 2 or len(op.src[0].shape) != b + 2:
        return None
    free = op.src[1].shape[b + 1 :]
    if out.shape[b + 1 :] == free:
        return out
    if len(out.shape) != b + 2 or out.shape[-1] != math.prod(free):
        return None
    steps = tuple(out.strides[-1] * step for step in contiguous(free))
    return out.over(out.shape[:-1] + free, out.strides[:-1] + steps)


def _view(ref: Ref, axes: Iterable[Any]) -> Ref:
    shape, strides = zip(*axes)
    return ref.over(shape, strides)
