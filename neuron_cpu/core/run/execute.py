"""Replay a Program on the CPU: fp32 arithmetic, rounding where the hardware rounds.

Operand views are resolved once per Plan; kernel inputs are bound without copying. bf16 and the
other narrow types are never computed in: operands are widened to fp32, results rounded once.
``merge`` joins the iterations of independent loops (merge.py); ``shadow`` keeps every float tile in
fp32 and rounds nothing, for comparison.

A torch matmul in bf16 rounds its result, so it cannot stand for PSUM: products run in fp32 on
widened operands, in chunks small enough that the widened weights stay in the cache.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..device import dtypes
from ..device.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from ..device.errors import NkiError
from ..language.tensor import Tensor
from ..program.program import Instruction, Program, Storage
from . import merge
from .merge import Op, Ref

Step = Callable[[], None]
CHUNK = 1 << 19  # widened weight elements per matmul call: 2 MiB of fp32, about one L2 cache
UNWRITTEN_INT = 77  # what an integer tile holds before anything is written
_DIRECT = (FLOAT32, BFLOAT16, FLOAT16)  # torch rounds these to nearest even when it copies


# --- memory ---------------------------------------------------------------------------------------
def allocate(size: int, dtype: DType) -> torch.Tensor:
    """Uninitialised memory, filled so that reading it shows: NaN, or 77 for integers."""
    if dtype.kind == "b":
        return torch.zeros(size, dtype=torch.bool)
    if dtype.is_int:
        return torch.full((size,), UNWRITTEN_INT, dtype=torch.int64).to(dtype.torch)
    return dtypes.encode(torch.full((size,), float("nan")), dtype)


def constant(storage: Storage) -> torch.Tensor:
    """Memory of a tensor whose contents are known while tracing."""
    assert storage.data is not None
    data = np.ascontiguousarray(storage.data).reshape(-1)
    if storage.dtype.is_int and storage.dtype.kind != "b":
        return torch.from_numpy(data.astype(np.int64)).to(storage.dtype.torch)
    return dtypes.encode(torch.from_numpy(data.astype(np.float32)), storage.dtype)


class Arena:
    """Flat memories by ``merge.Memory``; views are made of them with as_strided."""

    def __init__(self, shadow: bool = False) -> None:
        self.shadow = shadow
        self.flat: dict[int, torch.Tensor] = {}
        self._scratch: dict[int, torch.Tensor] = {}

    def scratch(self, slot: int, size: int) -> torch.Tensor:
        """fp32 memory for widened operands, kept between calls: fresh pages cost more than math."""
        held = self._scratch.get(slot)
        if held is None or held.numel() < size:
            held = self._scratch[slot] = torch.empty(size)
        return held[:size]

    def dtype(self, dt: DType) -> DType:
        return FLOAT32 if self.shadow and dt.is_float else dt

    def bind(self, memory: merge.Memory, values: torch.Tensor) -> None:
        """Use ``values`` (contiguous) as the memory."""
        if self.shadow and memory.storage.dtype.is_float:
            values = dtypes.decode(values, memory.storage.dtype)
        self.flat[id(memory)] = values.reshape(-1)

    def of(self, memory: merge.Memory) -> torch.Tensor:
        found = self.flat.get(id(memory))
        if found is None:
            storage = memory.storage
            if storage.data is not None:
                self.bind(memory, constant(storage))
                return self.flat[id(memory)]
            found = allocate(memory.size, self.dtype(storage.dtype))
            self.flat[id(memory)] = found
        return found

    def view(self, ref: Ref) -> torch.Tensor:
        """The stored elements of ``ref``."""
        flat = self.of(ref.memory)
        wanted = self.dtype(ref.dt).torch
        if ref.dt is not ref.memory.storage.dtype and flat.dtype is not wanted:
            flat = flat.view(wanted)
        # as_strided counts from the start of the allocation, not of a bound view
        return torch.as_strided(flat, ref.shape, ref.strides, flat.storage_offset() + ref.offset)


# --- reading and writing --------------------------------------------------------------------------
def widen(raw: torch.Tensor, dt: DType, bits: bool) -> torch.Tensor:
    """Operand values: fp32, or unsigned bit patterns as int64 for bitwise operators."""
    if bits:
        values = raw.to(torch.int64)
        return values if dt.kind != "i" else values & ((1 << 8 * dt.itemsize) - 1)
    if raw.dtype is torch.float32:
        return raw
    return dtypes.decode(raw, dt) if dt.itemsize == 1 and dt.is_float else raw.to(torch.float32)


def put(out: torch.Tensor, values: torch.Tensor, dt: DType, bits: bool, mask: Any) -> None:
    """Round ``values`` once to ``dt`` and write them, where ``mask`` allows."""
    if values.shape != out.shape:
        values = values.reshape(out.shape) if values.numel() == out.numel() else values
    if mask is not None:
        before = widen(out, dt, bits)
        values = torch.where(mask, values.to(before.dtype), before)
    if dt in _DIRECT or out.dtype is torch.float32 and dt is not dtypes.TFLOAT32:
        out.copy_(values)
    elif bits:
        out.copy_(_wrap(values, dt))
    else:
        out.copy_(dtypes.encode(values.contiguous(), dt).expand(out.shape))


def _wrap(values: torch.Tensor, dt: DType) -> torch.Tensor:
    """Bit patterns in int64 -> the integer type, keeping the low bits."""
    width = 8 * dt.itemsize
    low = values.to(torch.int64) & ((1 << width) - 1)
    if dt.kind == "i":
        low = torch.where(low >= 1 << (width - 1), low - (1 << width), low)
    return low.to(dt.torch)


def gather_index(ref: Ref, arena: Arena) -> torch.Tensor:
    """Flat element numbers of a view; of an indirect one the row comes from its index tile.

    Raises:
        NkiError: a row number lies outside of the tensor.
    """
    total: Any = ref.offset
    if ref.indirect is not None:
        total = total + _rows(ref, arena)
    for axis, (size, step) in enumerate(zip(ref.shape, ref.strides)):
        line = [1] * len(ref.shape)
        line[axis] = size
        total = total + (torch.arange(size) * step).reshape(line)
    return torch.as_tensor(total).expand(ref.shape)


def _rows(ref: Ref, arena: Arena) -> torch.Tensor:
    """Element offsets that the index tile of an indirect view chooses, one for each partition."""
    assert ref.indirect is not None
    tile, stride, length, (low, high) = ref.indirect
    rows = arena.view(tile).to(torch.int64).reshape(-1)
    wrong = rows[(rows + low < 0) | (rows + high >= length)]
    if wrong.numel():
        raise NkiError(
            "err_tensor_access_out_of_bound",
            f"indirect access to {ref.memory.storage.label()} with index {int(wrong[0])} at run "
            f"time, expected {-low} to {length - 1 - high}; correct the index tile or mask its "
            "rows",
        )
    rows = rows.reshape(-1, *(1,) * (len(ref.shape) - 1)) if rows.numel() > 1 else rows
    return rows * stride


def reader(ref: Ref, arena: Arena, values: bool, bits: bool) -> Callable[[], torch.Tensor]:
    """A function that gives the operand: widened ``values``, or stored elements."""
    dt = arena.dtype(ref.dt)
    if ref.indirect is not None:

        def gather() -> torch.Tensor:
            raw = arena.of(ref.memory)[gather_index(ref, arena)]
            return widen(raw, dt, bits) if values else raw

        return gather
    view = arena.view(ref)
    if not values or (view.dtype is torch.float32 and not bits):
        return lambda: view
    if dt in _DIRECT and not bits:
        return lambda: view.to(torch.float32)
    return lambda: widen(view, dt, bits)


def _rearranges(op: Op) -> bool:
    """True where a result may lie over elements that the instruction still has to read."""
    in_place = op.instruction.op.flow in ("copy", "elementwise")
    return any(
        ref.memory is target.memory
        and not (
            in_place
            and (ref.offset, ref.shape, ref.strides)
            == (target.offset, target.shape, target.strides)
        )
        for ref in op.src
        for target in op.dst
    )


# --- operations -----------------------------------------------------------------------------------
def _is_reversed(ref: Ref) -> bool:
    return any(step < 0 and size > 1 for step, size in zip(ref.strides, ref.shape))


def _reversed_step(op: Op, arena: Arena) -> Step:
    """An Op with axes that run backwards, which torch views cannot: it works on copies in order."""

    def forward(ref: Ref) -> Ref:
        if ref.indirect is not None or not _is_reversed(ref):
            return ref
        memory = merge.Memory(ref.memory.storage, math.prod(ref.shape), ())
        arena.flat[id(memory)] = arena.of(ref.memory)[gather_index(ref, arena).reshape(-1)]
        return Ref(memory, 0, ref.shape, merge.contiguous(ref.shape), ref.dt)

    def step() -> None:
        dst, src = tuple(map(forward, op.dst)), tuple(map(forward, op.src))
        made = Op(op.instruction, dst, src, op.attrs, op.batch, op.contract)
        make_step(made, arena)()
        for ref, copy in zip([*op.dst, *op.src], [*dst, *src]):
            if copy is ref:
                continue
            values = arena.flat.pop(id(copy.memory))
            if any(ref is target for target in op.dst):
                arena.of(ref.memory)[gather_index(ref, arena).reshape(-1)] = values

    return step


def make_step(op: Op, arena: Arena) -> Step:
    """One Op as a function without arguments, its views resolved."""
    if any(map(_is_reversed, op.refs())):
        return _reversed_step(op, arena)
    if op.name == "nc_matmul":
        return _matmul_step(op, arena)
    spec, attrs = op.instruction.op, op.attrs
    bits = bool(attrs.get("bits"))
    raw = bool(attrs.get("raw")) and not arena.shadow
    mask = attrs.get("mask")
    keep = None if mask is None else torch.from_numpy(np.array(mask))
    inputs = [reader(r, arena, not raw, bits) for r in op.src]
    if _rearranges(op):  # copies and transposes return views of their input
        inputs = [_cloned(read) for read in inputs]
    if any(r.indirect is not None for r in op.dst) or "rmw" in attrs:
        return _scatter_step(op, arena, inputs, raw, bits)
    outs = [(arena.view(r), arena.dtype(r.dt)) for r in op.dst]
    if len(outs) == 1:
        out, dt = outs[0]
        if raw and keep is None:
            return lambda: _copy(out, spec.compute(attrs, [f() for f in inputs]))
        return lambda: put(out, spec.compute(attrs, [f() for f in inputs]), dt, bits, keep)

    def several() -> None:
        results = spec.compute(attrs, [f() for f in inputs])
        for (out, dt), values in zip(outs, results):
            put(out, values, dt, bits, keep if values.shape == outs[0][0].shape else None)

    return several


def _cloned(read: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: read().clone()


def _copy(out: torch.Tensor, values: torch.Tensor) -> None:
    out.copy_(values if values.shape == out.shape else values.reshape(out.shape))


def _scatter_step(op: Op, arena: Arena, inputs: list, raw: bool, bits: bool) -> Step:
    """Indirect stores, and read-modify-write in HBM (duplicate rows add up)."""
    ref, attrs = op.dst[0], op.attrs
    dt = arena.dtype(ref.dt)
    mask = attrs.get("mask")

    def scatter() -> None:
        flat = arena.of(ref.memory)
        at = gather_index(ref, arena).reshape(-1)
        values = op.instruction.op.compute(attrs, [f() for f in inputs])
        values = values.expand(ref.shape).reshape(-1)
        if mask is not None:
            chosen = torch.from_numpy(np.array(mask)).expand(ref.shape).reshape(-1)
            at, values = at[chosen], values[chosen]
        if attrs.get("rmw") == "add":
            total = widen(flat, dt, False).clone().index_add_(0, at, values.to(torch.float32))
            put(flat, total, dt, False, None)
        else:
            flat[at] = values if raw else dtypes.encode(values, dt)

    return scatter


class _Product:
    """How a (batched) matmul becomes one torch matmul: groups of axes of both operands."""

    def __init__(self, op: Op) -> None:
        left, right, out = op.src[0], op.src[1], op.dst[0]
        ns, nm = op.attrs.get("free_axes", (1, 1))
        b = op.batch
        self.batch: list[int] = []
        k, m, n = [], [], []
        for axis in range(b):
            if axis in op.contract:
                k.append(axis)
            elif right.strides[axis] == 0 and left.strides[axis] != 0:
                m.append(axis)
            elif left.strides[axis] == 0 and right.strides[axis] != 0:
                n.append(axis)
            else:
                self.batch.append(axis)
        # contraction axes in the order of the larger operand's memory, so that it needs no copy
        wide = right if _elements(right) >= _elements(left) else left
        self.k = sorted([*k, b], key=lambda a: -wide.strides[a])
        self._keep_rows(wide, m, n, right)
        self.m, self.n = m, n
        self.left_axes = [*self.batch, *self.k, *m, *range(b + 1, b + 1 + ns)]
        self.right_axes = [*self.batch, *self.k, *n, *range(b + 1, b + 1 + nm)]
        self.out_axes = [*self.batch, *m, b, *n, b + 1]
        self.sizes = [out.shape[a] for a in self.batch]

    def _keep_rows(self, wide: Ref, m: list[int], n: list[int], right: Ref) -> None:
        """Blocked weights: outer blocks stay batch axes, so that each block is a plain matrix."""
        own = n if wide is right else m
        outer = max(wide.strides[a] for a in self.k)
        for axis in [a for a in own if wide.strides[a] > outer]:
            own.remove(axis)
            self.batch.append(axis)


def _picked(ref: Ref, axes: list[int]) -> Ref:
    """The view with just these axes (a contracted axis of a result has stride 0 and goes)."""
    shape = tuple(ref.shape[a] for a in axes)
    return Ref(ref.memory, ref.offset, shape, tuple(ref.strides[a] for a in axes), ref.dt)


def _elements(ref: Ref) -> int:
    count = 1
    for size, stride in zip(ref.shape, ref.strides):
        if stride:
            count *= size
    return count


class _Operand:
    """One side of a product: a view (batch..., K..., free...) that becomes fp32 matrices."""

    def __init__(self, arena: Arena, ref: Ref, batch: int, k: int, slot: int) -> None:
        self.view = arena.view(ref)
        self.dt, self.arena, self.slot = arena.dtype(ref.dt), arena, slot
        self.lead = self.view.shape[:batch]
        self.depth = math.prod(self.view.shape[batch : batch + k])
        self.fixed = all(self.view.stride(a) == 0 for a in range(batch) if self.lead[a] > 1)

    def whole(self) -> torch.Tensor:
        """(batch..., K, free) in fp32; widened before axes are joined, so that one copy is made."""
        return widen(self.view, self.dt, False).reshape(*self.lead, self.depth, -1)

    def matrix(self, place: tuple[int, ...], part: slice) -> torch.Tensor:
        """(K of ``part``, free) of one batch, in scratch memory where it has to be copied."""
        view = self.view[place][part]
        rows = self.depth // self.view.shape[len(self.lead)] * view.shape[0]
        if self.dt is FLOAT32 and view.is_contiguous():
            return view.view(rows, -1)
        room = self.arena.scratch(self.slot, view.numel())
        room.view(view.shape).copy_(view if self.dt in _DIRECT else widen(view, self.dt, False))
        return room.view(rows, -1)


def _matmul_step(op: Op, arena: Arena) -> Step:
    """One torch matmul, or a loop over batches and parts of K whose operands fit the cache."""
    product = _Product(op)
    axes = product.left_axes, product.right_axes
    left, right = (
        _Operand(arena, _picked(op.src[k], axes[k]), len(product.batch), len(product.k), k)
        for k in (0, 1)
    )
    out = arena.view(_picked(op.dst[0], product.out_axes))
    adds = bool(op.attrs.get("accumulate"))

    def at_once() -> None:
        values = torch.matmul(left.whole().transpose(-1, -2), right.whole()).reshape(out.shape)
        out.add_(values) if adds else out.copy_(values)

    widest = max(left.view.numel(), right.view.numel())
    if widest <= CHUNK:
        return at_once
    return _in_parts(left, right, out, product, adds)


def _in_parts(
    left: _Operand, right: _Operand, out: torch.Tensor, product: _Product, adds: bool
) -> Step:
    """Batch after batch, part after part of K; an operand that stays the same is widened once."""
    count = left.view.shape[len(product.batch)]
    places = list(np.ndindex(*product.sizes))
    widest = max(left.view.numel(), right.view.numel()) // len(places)
    length = max(1, count * CHUNK // max(1, widest))
    parts = [slice(k, min(k + length, count)) for k in range(0, count, length)]
    keep = [side.fixed and len(parts) == 1 for side in (left, right)]

    def run() -> None:
        x = left.matrix(places[0], parts[0]) if keep[0] else None
        y = right.matrix(places[0], parts[0]) if keep[1] else None
        for place in places:
            total: torch.Tensor | None = None
            for part in parts:
                a = (left.matrix(place, part) if x is None else x).t()
                b = right.matrix(place, part) if y is None else y
                total = torch.mm(a, b) if total is None else total.addmm_(a, b)
            assert total is not None
            target = out[place]
            values = total.reshape(target.shape)
            target.add_(values) if adds else target.copy_(values)

    return run


# --- runners --------------------------------------------------------------------------------------
class Machine:
    """Executes instructions one by one as they are recorded (eager mode)."""

    def __init__(self, shadow: bool = False) -> None:
        self.arena = Arena(shadow)
        self.lowering = merge.Lowering(merge=False)

    def _memory(self, storage: Storage) -> merge.Memory:
        return self.lowering.ref(Tensor.whole(storage)).memory

    def bind(self, storage: Storage, values: torch.Tensor) -> None:
        """Give a kernel input its data."""
        self.arena.bind(self._memory(storage), values)

    def memory(self, storage: Storage) -> torch.Tensor:
        """Contents of a storage, in its declared shape."""
        return self.arena.of(self._memory(storage)).reshape(storage.shape)

    def run(self, instruction: Instruction) -> None:
        make_step(self.lowering.op(instruction), self.arena)()

    def values(self, view: Tensor) -> np.ndarray:
        """Current values of a view, as a numpy array of fp32 (integers as they are)."""
        ref = self.lowering.ref(view)
        raw = self.arena.view(ref)
        if view.dt.is_int:
            return raw.numpy().copy()
        return widen(raw, self.arena.dtype(view.dt), False).numpy().copy()


class Plan:
    """A Program made ready to run again and again on one thread.

    Args:
        merge_loops: join independent iterations; default from NKI_CPU_MERGE (1).
        shadow: keep all float tiles in fp32 and round nothing.
    """

    def __init__(
        self,
        program: Program,
        merge_loops: bool | None = None,
        shadow: bool = False,
    ) -> None:
        if merge_loops is None:
            merge_loops = os.environ.get("NKI_CPU_MERGE", "1") != "0"
        self.program = program
        self.arena = Arena(shadow)
        self.ops = merge.lower(program, merge_loops)
        self.steps: list[Step | None] = []
        self.external: dict[int, merge.Memory] = {}
        for op in self.ops:
            for ref in op.refs():
                if ref.memory.storage.role in ("input", "output"):
                    self.external[ref.memory.storage.id] = ref.memory
        self.written = {r.memory.storage.id for op in self.ops for r in op.dst}
        self._share_memory()
        moving = {id(m) for m in self.external.values()}
        self.steps = [
            None if any(id(r.memory) in moving for r in op.refs()) else make_step(op, self.arena)
            for op in self.ops
        ]

    def _share_memory(self) -> None:
        """On-chip tensors that are never live together share memory (first fit by type)."""
        last: dict[int, int] = {}
        for at, op in enumerate(self.ops):
            for ref in op.refs():
                last[id(ref.memory)] = at
        free: dict[torch.dtype, list[torch.Tensor]] = {}
        ends: dict[int, list[tuple[DType, torch.Tensor]]] = {}
        for at, op in enumerate(self.ops):
            for ref in op.refs():
                memory = ref.memory
                storage = memory.storage
                if storage.role != "local" or id(memory) in self.arena.flat:
                    continue
                dt = self.arena.dtype(storage.dtype)
                block = _take(free.setdefault(dt.torch, []), memory.size)
                if block is None:
                    block = allocate(memory.size, dt)
                self.arena.flat[id(memory)] = block[: memory.size]
                ends.setdefault(last[id(memory)], []).append((dt, block))
            for dt, block in ends.pop(at, ()):
                free.setdefault(dt.torch, []).append(block)

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs of the kernel for ``inputs`` (contiguous, in the order of ``program.inputs``).

        Mutable inputs are updated in place (a shadow run updates fp32 copies of them).
        """
        results = self.start(inputs)
        for k in range(len(self.ops)):
            self.step(k)
        return self.finish(results)

    def start(self, inputs: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Bind inputs and fresh outputs: the memories of all outputs by storage id."""
        results: dict[int, torch.Tensor] = {}
        for storage, values in zip(self.program.inputs, inputs):
            memory = self.external.get(storage.id)
            if memory is not None:
                self.arena.bind(memory, values)
                if storage.id in self.written:  # a mutable parameter, updated in place
                    values = self.arena.of(memory).reshape(storage.shape)
            if storage.mutable:
                results[storage.id] = values
        for storage in self.program.outputs:
            if storage.id in results:
                continue
            made = allocate(storage.size, self.arena.dtype(storage.dtype)).reshape(storage.shape)
            results[storage.id] = made
            memory = self.external.get(storage.id)
            if memory is not None:
                self.arena.flat[id(memory)] = made.reshape(-1)
        return results

    def step(self, number: int) -> None:
        """Execute one operation."""
        (self.steps[number] or make_step(self.ops[number], self.arena))()

    def finish(self, results: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Let go of the caller's memory and give the outputs in order."""
        for memory in self.external.values():
            self.arena.flat.pop(id(memory), None)
        return [results[storage.id] for storage in self.program.outputs]


def _take(blocks: list[torch.Tensor], size: int) -> torch.Tensor | None:
    """The smallest free block that holds ``size`` elements without wasting half of itself."""
    fitting = [b for b in blocks if size <= b.numel() <= 2 * size]
    if not fitting:
        return None
    best = min(fitting, key=lambda b: b.numel())
    for k, block in enumerate(blocks):
        if block is best:
            del blocks[k]
            break
    return best
