"""Memory of a running Program, and how operands are read from it and results written.

bf16 and the other narrow types are never computed in: operands are widened to fp32, results rounded
once. A view is resolved to ``torch.as_strided`` over a flat memory, where one serves.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..device import dtypes
from ..device.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType, Tensors
from ..device.errors import refuse
from ..program.storage import Storage
from .merge import Memory, Ref

TWINS = 1 << 16  # elements of the largest tile of bf16 that is kept as the upper halves of fp32
UNWRITTEN_INT = 77  # what an integer tile holds before anything is written
Multiply = Callable[[torch.Tensor, torch.Tensor], None]  # operand, result
DIRECT = (FLOAT32, BFLOAT16, FLOAT16)  # torch rounds these to nearest even when it copies


# --- memory ---------------------------------------------------------------------------------------
@torch.inference_mode(False)  # results are made here, and callers may use them in either mode
def allocate(size: int, dtype: DType, whole: bool = False) -> torch.Tensor:
    """Uninitialised memory, filled so that reading it shows: NaN, or 77 for integers.

    Args:
        whole: all of it is written, so that nothing has to fill it.
    """
    if whole:
        return torch.empty(size, dtype=dtype.torch)
    if dtype.kind == "b":
        return torch.zeros(size, dtype=torch.bool)
    if dtype.is_int:
        return torch.full((size,), UNWRITTEN_INT, dtype=torch.int64).to(dtype.torch)
    if dtype in DIRECT:
        return torch.full((size,), float("nan"), dtype=dtype.torch)
    return dtypes.encode(torch.full((size,), float("nan")), dtype)


def constant(storage: Storage) -> torch.Tensor:
    """Memory of a tensor whose contents are known while tracing."""
    assert storage.data is not None
    data = np.ascontiguousarray(storage.data).reshape(-1)
    if storage.dtype.is_int and storage.dtype.kind != "b":
        return torch.from_numpy(data.astype(np.int64)).to(storage.dtype.torch)
    return dtypes.encode(torch.from_numpy(data.astype(np.float32)), storage.dtype)


def reinterpreted(values: torch.Tensor, storage: Storage) -> torch.Tensor:
    """The bits of a tensor as elements of the storage's type."""
    return values.reshape(-1).view(torch.uint8).view(storage.dtype.torch)


@torch.inference_mode(False)
def allocate_twin(size: int) -> torch.Tensor:
    """Memory of bf16 elements that are the upper halves of fp32 ones, whose lower halves are zeros:
    so it can be read as fp32, too, without a copy (``widened``)."""
    return torch.zeros(size).view(torch.bfloat16)[1::2].fill_(float("nan"))


def is_twin(flat: torch.Tensor) -> bool:
    return flat.dtype is torch.bfloat16 and flat.ndim == 1 and flat.stride(0) == 2


def widened(twin: torch.Tensor) -> torch.Tensor:
    """The fp32 elements of a memory of ``allocate_twin``."""
    whole = torch.empty(0, dtype=torch.float32).set_(twin.untyped_storage())
    return whole.as_strided(twin.shape, [1], twin.storage_offset() // 2)


@contextmanager
def alone() -> Iterator[None]:
    """PyTorch's functions are seen by modes that are entered inside of the block alone: whoever
    watches a model's own work enabled his before, and sees none of the simulator's."""
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(torch._C._pop_torch_function_stack())
    try:
        with torch._C._EnableTorchFunction():
            yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def unseen() -> Iterator[None]:
    """Inside the block nobody sees or records PyTorch's operators."""
    with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _make_operators_once() -> None:
    """Let PyTorch make the object of an operator once, whichever threads ask for it first.

    Its dispatcher keeps the first object that a mode was called with, without a reference
    (getTorchApiFunction in torch/csrc/PyInterpreter.cpp), and `torch.ops` keeps the last one made.
    Of two ranks that met an operator first at once, one left the dispatcher a freed object.
    """
    lock = threading.RLock()
    # a child has no thread that would release it
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )

    def once(make: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        @functools.wraps(make)
        def found(owner: Any, name: str) -> Any:
            with lock:
                kept = vars(owner)
                return kept[name] if name in kept else make(owner, name)

        return found

    for owner in (torch._ops._Ops, torch._ops._OpNamespace, torch._ops.OpOverloadPacket):
        owner.__getattr__ = once(owner.__getattr__)  # type: ignore[method-assign]


_make_operators_once()


class Arena:
    """Flat memories by ``Memory``; views are made of them with as_strided.

    Attributes:
        shadow: whether floats are kept in fp32.
        moving: the memories, by id, that every run binds anew: views of them are made when a step
            runs, all others once.
        lasting: the memories, by id, that one run settles for all later ones (lasting.py).
        large: the operations, by id, that all threads share (threads.py).
        recorded: what makes products by ``product`` while a run is recorded (short.py).
        packs: packed matrices (packing.py) of what this run has bound, by id of the memory.
        packable: the products (packing.py) that take them, by id of the memory.
    """

    def __init__(self, shadow: bool = False) -> None:
        self.shadow = shadow
        self.flat: dict[int, torch.Tensor] = {}
        self.moving: set[int] = set()
        self.packs: dict[int, dict] = {}
        self.packable: dict[int, list] = {}
        self.lasting: set[int] = set()
        self.large: set[int] = set()
        self.recorded: Callable[..., torch.Tensor] | None = None
        self._scratch: dict[int, torch.Tensor] = {}

    def scratch(self, slot: int, size: int) -> torch.Tensor:
        """fp32 memory for widened operands, kept between calls: fresh pages cost more than math.

        A slot that grows is a new tensor; who holds part of the old one goes on with that.
        """
        held = self._scratch.get(slot)
        if held is None or held.numel() < size:
            held = self._scratch[slot] = torch.empty(size)
        return held[:size]

    def scratches(self) -> Tensors:
        return list(self._scratch.values())

    def product(
        self, of: Any, values: torch.Tensor, shape: tuple[int, int], multiply: Multiply
    ) -> torch.Tensor:
        """What ``multiply`` makes of fp32 values: one call of a record, named by ``of``."""
        if self.recorded is not None:
            return self.recorded(of, values, shape, multiply)
        made = torch.empty(shape)
        multiply(values, made)
        return made

    def dtype(self, storage: Storage) -> DType:
        """The torch type of a storage's elements; a storage of several types keeps its bytes."""
        return self._kept(storage, storage.dtype)

    def kept(self, ref: Ref) -> DType:
        """The torch type of the elements of ``ref``."""
        return self._kept(ref.memory.storage, ref.dt)

    def _kept(self, storage: Storage, dt: DType) -> DType:
        widened = self.shadow and dt.is_float and storage.ground is None
        return FLOAT32 if widened else dt

    def bind(self, memory: Memory, values: torch.Tensor, short: bool = False) -> None:
        """Use ``values`` (contiguous) as the memory; ``short``: in the shape that they have."""
        storage = memory.storage
        if self.dtype(storage) is not storage.dtype:
            values = dtypes.decode(values, storage.dtype)
        elif values.dtype is torch.float8_e4m3fn:
            values = values.view(torch.uint8)  # as it is kept: a copy moves bytes
        self.flat[id(memory)] = values
        if not short:
            self.flatten(memory)

    def flatten(self, memory: Memory) -> None:
        """See a bound memory as one row of elements."""
        values = self.flat.get(id(memory))
        if values is not None and values.ndim != 1:
            self.flat[id(memory)] = values.view(-1)

    def of(self, memory: Memory) -> torch.Tensor:
        """The flat tensor of ``memory``; constants and memories not seen before are made here."""
        found = self.flat.get(id(memory))
        if found is None:
            storage = memory.storage
            if storage.data is not None:
                self.bind(memory, constant(storage))
                return self.flat[id(memory)]
            found = self.flat[id(memory)] = allocate(memory.size, self.dtype(storage))
        return found

    def view(self, ref: Ref) -> torch.Tensor:
        """The stored elements of ``ref``."""
        flat = self.of(ref.memory)
        wanted = self.kept(ref).torch
        if ref.dt is not ref.memory.storage.dtype and flat.dtype is not wanted:
            flat = flat.view(wanted)
        # as_strided counts from the start of the allocation, not of a bound view
        step = 2 if is_twin(flat) else 1
        strides = ref.strides if step == 1 else tuple(step * s for s in ref.strides)
        offset = flat.storage_offset() + step * ref.offset
        return torch.as_strided(flat, ref.shape, strides, offset)

    def fp32(self, ref: Ref) -> torch.Tensor | None:
        """The elements of ``ref`` as fp32, where they lie in memory as such in every run."""
        if id(ref.memory) in self.moving:
            return None
        flat = self.of(ref.memory)
        if is_twin(flat):
            wide = widened(flat)
            return wide.as_strided(ref.shape, ref.strides, wide.storage_offset() + ref.offset)
        return self.view(ref) if flat.dtype is torch.float32 is self.kept(ref).torch else None

    def viewer(self, ref: Ref) -> Callable[[], torch.Tensor]:
        """A function that gives the stored elements of ``ref`` in every run."""
        if id(ref.memory) not in self.moving:
            view = self.view(ref)
            return lambda: view
        if ref.dt is not ref.memory.storage.dtype:
            return lambda: self.view(ref)
        # The same as ``view``, with less around it: some steps do little more.
        held, key = self.flat, id(ref.memory)
        shape, strides, offset = ref.shape, ref.strides, ref.offset

        def moved() -> torch.Tensor:
            flat = held.get(key)
            if flat is None:  # an output that nobody asked for
                flat = self.of(ref.memory)
            return flat.as_strided(shape, strides, flat.storage_offset() + offset)

        return moved


def take(blocks: Tensors, size: int) -> torch.Tensor | None:
    """The smallest free block that holds ``size`` elements without wasting half of itself."""
    sizes = [(block.numel(), k) for k, block in enumerate(blocks)]
    best = min((one for one in sizes if size <= one[0] <= 2 * size), default=None)
    return None if best is None else blocks.pop(best[1])


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
    # Elements outside of the mask are written back as they were: widening and rounding undo each
    # other exactly, but for integers, of which fp32 does not hold all.
    if mask is not None and dt.is_int and not bits and dt.kind != "b":
        out.copy_(torch.where(mask, dtypes.encode(values.expand(out.shape), dt), out))
        return
    if mask is not None:
        before = widen(out, dt, bits)
        values = torch.where(mask, values.to(before.dtype), before)
    if dt in DIRECT or out.dtype is torch.float32 and dt is not dtypes.TFLOAT32:
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


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}


def scatter(flat: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    """``flat[at] = values``, which torch does not have for wider unsigned types: as their bits."""
    bits = _SIGNED.get(flat.dtype)
    if bits is None:
        flat[at] = values
    else:
        flat.view(bits)[at] = values.to(flat.dtype).view(bits)


def gather_index(ref: Ref, arena: Arena, skip: bool = False) -> torch.Tensor:
    """Flat element numbers of a view; of an indirect one the row comes from its index tile.

    Args:
        skip: rows outside of the tensor are somewhere inside instead of an error.

    Raises:
        NkiError: a row number lies outside of the tensor.
    """
    # A sum of one arange for each axis, broadcast against each other.
    total: Any = ref.offset
    if ref.by_data is not None:
        total = total + _rows(ref, arena, skip)
    for axis, (size, step) in enumerate(zip(ref.shape, ref.strides)):
        line = [1] * len(ref.shape)
        line[axis] = size
        total = total + (torch.arange(size) * step).reshape(line)
    return torch.as_tensor(total).expand(ref.shape)


def rows_inside(ref: Ref, arena: Arena) -> torch.Tensor:
    """Which rows of a view lie inside of its tensor, in a shape that broadcasts to the view's."""
    if ref.by_data is None:
        return torch.ones((1,) * len(ref.shape), dtype=torch.bool)
    tile, _, length, (low, high) = ref.by_data
    rows = arena.view(tile).to(torch.int64).reshape(-1, *(1,) * (len(ref.shape) - 1))
    return (rows + low >= 0) & (rows + high < length)


def _rows(ref: Ref, arena: Arena, skip: bool) -> torch.Tensor:
    """Element offsets that the index tile of an indirect view chooses, one for each partition."""
    assert ref.by_data is not None
    tile, stride, length, (low, high) = ref.by_data
    # Only now are the rows known: the first moment at which bounds can be checked. ``low`` and
    # ``high`` are what the rest of the subscript adds to a row.
    rows = arena.view(tile).to(torch.int64).reshape(-1)
    outside = (rows + low < 0) | (rows + high >= length)
    if skip:
        rows = torch.where(outside, -low, rows)
    elif (wrong := rows[outside]).numel():
        raise refuse(
            "err_tensor_access_out_of_bound",
            f"indirect access to {ref.memory.storage.label()} with index {int(wrong[0])} at run "
            f"time, expected {-low} to {length - 1 - high}; correct the index tile or mask its "
            "rows",
        )
    rows = rows.reshape(-1, *(1,) * (len(ref.shape) - 1)) if rows.numel() > 1 else rows
    return rows * stride


def reader(ref: Ref, arena: Arena, values: bool, bits: bool) -> Callable[[], torch.Tensor]:
    """A function that gives the operand: widened ``values``, or stored elements."""
    dt = arena.kept(ref)
    if ref.by_data is not None:

        def gather() -> torch.Tensor:
            raw = arena.of(ref.memory)[gather_index(ref, arena)]
            return widen(raw, dt, bits) if values else raw

        return gather
    if values and not bits:
        wide = arena.fp32(ref)
        if wide is not None:
            return lambda: wide
    view = arena.viewer(ref)
    if not values or (dt.torch is torch.float32 and not bits):
        return view
    if dt in DIRECT and not bits:
        return lambda: view().to(torch.float32)
    return lambda: widen(view(), dt, bits)
