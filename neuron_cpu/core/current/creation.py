"""Tensors of ``nki.language``: ``ndarray`` and its kin, loads, stores, ``t[...] =``, grids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..device.dtypes import DType, Shape, to_dtype
from ..device.errors import refuse, type_name, warn
from ..device.spec import CORE
from ..instructions.arguments import as_row, no_tensor, whole, wholes
from ..language.creation import name_at, no_sizes, tiled
from ..program import trace
from ..program.accumulation import Groups
from ..program.index import is_integer
from ..program.placement import Tile
from ..program.storage import Storage
from ..program.view import View, called
from .copies import fill, tensor_copy
from .operands import naming, tensor
from .selection import affine_select
from .tensor import MAX_AXES, NkiTensor
from .transfers import dma_copy
from .types import MemoryRegion, Name, element_type, region, sbuf

PSUM_BYTES = 16 * 1024  # a tensor in PSUM may take all banks of a partition


def new(shape: Sequence[int], dt: DType, buffer: MemoryRegion, name: str = "") -> Any:
    """An uninitialised tensor, checked."""
    tracer = trace.current("nl.ndarray")
    if name and not isinstance(name, str):
        raise refuse(
            "sim_instruction_name",
            f"a tensor is named with a {type_name(name)}, expected a string; write name='label', "
            "and address= for a place",
        )
    kind = buffer._value_  # as .value is, which asks a descriptor
    plain = type(shape) is tuple and {*map(type, shape)} == {int}
    if not plain or (shape, dt, kind) not in tracer.legal:
        shape = _shape_of(shape, dt, kind)
        tracer.legal.add((shape, dt, kind))
    if kind == "shared_hbm":
        made = tracer.shared_storage(tuple(shape), dt)
    else:
        made = tracer.storage(shape, dt, kind)
    if kind == "psum":  # no initial value: the first product of a region overwrites
        made.groups = Groups(made.size, zeroed=False)
    made.source = tracer.place()
    made.name = name or name_at(made.source)
    return tracer.whole(made)


def _shape_of(given: Sequence[int], dt: DType, kind: str) -> Shape:
    """The sizes of a tensor's axes, checked."""
    shape: Shape = ()
    if isinstance(given, (list, tuple)) and all(map(is_integer, given)):
        shape = tuple(map(int, given))
    if not shape or min(shape) < 1:
        raise refuse(
            "sim_shape",
            f"tensor shape {given!r}, expected positive integers known while building; "
            + no_sizes(given),
        )
    if kind not in ("sbuf", "psum"):
        return shape
    if len(shape) < 2:
        raise refuse(
            "sim_rank",
            f"Insufficient rank: {kind} tensor of shape {shape}, expected at least 2 axes; begin "
            "with the partitions, (1, n) for a row and (n, 1) for a column",
        )
    if shape[0] > CORE.partitions:
        raise refuse(
            "err_num_partition_exceed_arch_limit",
            f"{kind} tensor of shape {shape}: partition dimension {shape[0]} exceeds maximum "
            f"{CORE.partitions}; {tiled(shape, CORE.partitions)}",
        )
    size = math.prod(shape[1:]) * dt.itemsize
    if kind == "psum" and size > PSUM_BYTES:
        step = CORE.psum_bank_bytes // dt.itemsize
        mend = f"make one of ({shape[0]}, {step}) for each step of a loop over j in range(0, "
        mend += f"{size // dt.itemsize}, {step}), for columns j:j + {step} of the result"
        if len(shape) > 2 and shape[0] < shape[1] <= CORE.partitions:  # a batch comes first
            mend = f"axis 0 lies on partitions: make one of {shape[1:]} for each of {shape[0]}"
        raise refuse(
            "err_size_of_dimension_exceed_arch_limit",
            f"psum tensor of shape {shape} {dt} needs {size} bytes per partition, expected at "
            f"most {PSUM_BYTES}; {mend}",
        )
    return shape


def ndarray(
    shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "", address: Any = None
) -> Any:
    """An uninitialised tensor; ``address`` (partition, byte) fixes its place on chip."""
    trace.current("nl.ndarray")
    made = new(shape, element_type(dtype), region(buffer), name)
    if address is not None:
        _place(made.storage, address)
    return made


def _place(storage: Storage, address: Any) -> None:
    """Put a tensor where the kernel wants it.

    The free offset counts bytes: the migration text says elements, but its own example, the
    published parser and AWS's library, which devices ran, pass bytes.
    """
    given = wholes(address, "address")
    partition, byte = given if len(given) == 2 else (-1, -1)
    legal = CORE.start_partitions(storage.shape[0])
    limit = PSUM_BYTES if storage.buffer == "psum" else CORE.sbuf_usable_bytes
    wrong = ""
    if not storage.on_chip:
        wrong = "a tensor in SBUF or PSUM"
    elif partition not in legal:
        wrong = f"partition {' or '.join(map(str, legal))}"
    elif byte < 0 or byte + storage.tile_bytes > limit:
        wrong = f"bytes 0 to {limit}"
    elif storage.buffer == "psum" and byte % CORE.psum_bank_bytes:
        wrong = f"the start of a bank, a multiple of {CORE.psum_bank_bytes}"
    if wrong:
        raise refuse(
            "sim_allocation_address",
            f"{storage.label()} at address {tuple(address)}, expected {wrong}; leave address= "
            "out to have it placed",
        )
    tracer = trace.current("nl.ndarray")
    program = tracer.program
    core = tracer.grid_index[0] if program.cores > 1 else 0
    storage.address = [Tile(storage, 0, partition, byte, core)]
    program.direct_allocation = program.mixed_placement = True


# --- with content ---------------------------------------------------------------------------------
def full(
    shape: Any, fill_value: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = ""
) -> Any:
    """A tensor of one value in any memory."""
    made = ndarray(shape, dtype, buffer, name)
    (fill if made.on_chip else _fill_hbm)(made, fill_value)
    return made


def _fill_hbm(target: Any, value: Any) -> None:
    """A constant into HBM: engines write no HBM, so a tile is filled and sent in blocks of rows."""
    rows = target.shape[0] if target.ndim > 1 else 1
    view = target if target.ndim > 1 else target.reshape((1, target.size))
    most = min(rows, CORE.partitions)
    tile = new((most, *view.shape[1:]), target.dt, sbuf)
    fill(tile, value)
    for first in range(0, rows, most):
        part = view[first : min(first + most, rows)]
        dma_copy(part, tile[0 : part.shape[0]])


def zeros(shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> Any:
    """A tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> Any:
    """A tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def _like(x: Any, dtype: Any, buffer: Any) -> tuple[Any, Any, Any]:
    return x.shape, (x.dtype if dtype is None else dtype), x.buffer if buffer is None else buffer


def zeros_like(x: View, dtype: Any = None, buffer: Any = None, name: str = "") -> Any:
    """Zeros in the shape, type and memory of ``x``."""
    return zeros(*_like(x, dtype, buffer), name=name)


def empty_like(x: View, dtype: Any = None, buffer: Any = None, name: str = "") -> Any:
    """An uninitialised tensor in the shape, type and memory of ``x``."""
    return ndarray(*_like(x, dtype, buffer), name=name)


def _of_file(path: str | Path) -> Any:
    try:
        return np.load(path)
    except (OSError, ValueError) as error:
        raise refuse(
            "sim_constant",
            f"nl.shared_constant of the file {str(path)!r}: {error}, expected the path of a .npy "
            "file; write one with np.save(path, array)",
        ) from None


def shared_constant(constant: Any) -> Any:
    """A numpy array (or the path of a .npy file) as an HBM tensor that the program brings along."""
    tracer = trace.current("nl.shared_constant")
    values = _of_file(constant) if isinstance(constant, (str, Path)) else constant
    if not isinstance(values, np.ndarray) or not values.ndim:
        raise refuse(
            "sim_constant",
            f"nl.shared_constant of {type(values).__name__}, expected a numpy array of at least "
            "one axis or the path of a .npy file; turn lists into arrays with np.asarray",
        )
    try:
        dt = to_dtype(values.dtype)
    except TypeError as error:
        raise refuse("sim_constant", f"nl.shared_constant of an array: {error}") from None
    made = tracer.storage(values.shape, dt, "shared_hbm", "const")
    made.data, made.frame, made.source = values, None, tracer.place()
    made.name = name_at(made.source) or "constant"
    return tracer.whole(made)


def shared_identity_matrix(n: int, dtype: Any = "uint8", dst: Any = None) -> Any:
    """The identity (n, n) in SBUF; one for each type and size of a kernel."""
    tracer = trace.current("nl.shared_identity_matrix")
    if dst is None:
        kept = tracer.identities
        n = whole(n, "size of nl.shared_identity_matrix")
        key = (n, element_type(dtype).name, tracer.grid_index)
        if key in kept:
            return kept[key]
        dst = kept[key] = new((n, n), element_type(dtype), sbuf, "identity")
        dst.storage.frame = None
    tensor(dst, "nl.shared_identity_matrix")
    ones_tile = new((n, n), dst.dt, sbuf)
    fill(ones_tile, 1.0)
    affine_select(dst, [[-1, n]], 1, ones_tile, 0.0)
    return dst


# --- between HBM and SBUF -------------------------------------------------------------------------
def load(src: View, dtype: Any = None) -> Any:
    """An HBM region as a new SBUF tile of the same shape."""
    if src.on_chip:
        raise refuse(
            "err_unsupported_memory",
            f"nl.load of {src.label()}, expected HBM; copy tiles with nisa.tensor_copy",
        )
    dt = src.dt if dtype is None else element_type(dtype)
    shape = src.shape if src.ndim > 1 else (1, *src.shape)
    if src.ndim < 2:
        warn(
            "sim_rank",
            f"nl.load of {src.label()}: sources leave open which tile of two axes it gives, here "
            f"{shape}, expected a partition axis; load {as_row(src)}",
        )
    made = new(shape, dt, sbuf)
    dma_copy(made, src)
    return made


def store(dst: View, value: View) -> None:
    """An SBUF tile to an HBM region with as many elements."""
    if dst.on_chip or value.storage.buffer != "sbuf":
        if dst.on_chip and not value.on_chip:
            mend = "give the tensor in HBM first and the tile second"
        elif dst.on_chip:
            mend = "make a result with buffer=nl.shared_hbm, and copy on chip with nisa.tensor_copy"
        elif value.on_chip:
            mend = f"copy PSUM to SBUF first, nl.store({called(dst)}, nl.copy({called(value)}))"
        else:
            mend = "copy between tensors in HBM with nisa.dma_copy"
        raise refuse(
            "err_unsupported_memory",
            f"nl.store of {value.label()} to {dst.label()}, expected SBUF to HBM; {mend}",
        )
    dma_copy(dst, value)


def load_transpose2d(src: View, dtype: Any = None) -> Any:
    """An HBM region (F, P) as a new SBUF tile (P, F)."""
    dt = src.dt if dtype is None else element_type(dtype)
    if src.ndim != 2:
        raise refuse("sim_rank", f"nl.load_transpose2d of {src.label()}, expected 2 axes; slice it")
    made = new(src.shape[::-1], dt, sbuf)
    dma_copy(made, src.permute((1, 0)))  # type: ignore[attr-defined]
    return made


# --- assignment -----------------------------------------------------------------------------------
def _assignment(self: NkiTensor, key: Any, value: Any) -> None:
    """``t[...] = value``: a copy or a fill of the region, and a transfer where HBM takes part.

    trnblas 0.5.4 assigns tiles so, and trnrand cb37049 parts of HBM; both ran on a trn1.
    """
    target, said = self[key], f"{self.name or 'tensor'}[...] = value"
    with naming(said):
        if isinstance(value, (int, float, np.number)):
            (fill if target.on_chip else _fill_hbm)(target, value)
        elif not isinstance(value, View):
            raise no_tensor(value, said, "a tensor or a number")
        elif value.storage is target.storage and value.key() == target.key():
            return
        elif target.on_chip and value.on_chip:
            tensor_copy(target, value)
        else:
            dma_copy(target, value)


NkiTensor.__setitem__ = _assignment  # type: ignore[index]


# --- grids (SDK 2.33) -----------------------------------------------------------------------------
# ``nl.tiles`` and ``nl.blocks`` cut tensors into tiles, and tiles into blocks. Grids are views:
# they record nothing. Tiles of a grid that ``alloc_tiles`` made on chip lie side by side: tile (i,
# j) of n columns begins at column (i n + j) width, whatever the tiles at the edge use. Source:
# awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated, nki.language.tiles, blocks,
# alloc_tiles, alloc_blocks and NkiGrid; no public kernel uses them yet.
Span = tuple[int, int]  # first element of an axis and the one behind the last


@dataclass(frozen=True)
class NkiGrid:
    """A part of a tensor in coordinates of tiles or blocks.

    Attributes:
        backing: the whole tensor; of a packed grid its tiles side by side.
        tile_shape: elements of a tile along the last axes.
        spans: of each axis of the source, in elements.
        kept: axes that still have a coordinate.
        columns: tiles in a row of a packed grid, or 0.
        block_shape: tiles of a block, of a grid of blocks.
    """

    backing: NkiTensor
    tile_shape: Shape
    spans: tuple[Span, ...]
    kept: Shape
    columns: int = 0
    block_shape: Shape = ()

    @property
    def dtype(self) -> Name:
        return self.backing.dtype

    @property
    def buffer(self) -> MemoryRegion:
        return self.backing.buffer

    @property
    def element_shape(self) -> Shape:
        """Elements of each axis, without leading axes that an index has consumed."""
        lead = len(self.spans) - len(self.tile_shape)
        axes = [a for a in range(len(self.spans)) if a >= lead or a in self.kept]
        return tuple(self.spans[a][1] - self.spans[a][0] for a in axes)

    @property
    def shape(self) -> Shape:
        sizes = [(self.spans[a], self._step(a)) for a in self.kept]
        return tuple(-(-(stop - start) // step) for (start, stop), step in sizes)

    @property
    def index_step_elements(self) -> Shape:
        return tuple(self._step(a) for a in self.kept)

    @property
    def is_remainder(self) -> bool:
        """Whether a tile or block of the selection is cut at the edge."""
        return any((b - a) % self._step(k) for k, (a, b) in enumerate(self.spans))

    def _step(self, axis: int) -> int:
        at = axis - len(self.spans) + len(self.tile_shape)
        in_tiles = self.block_shape or (1,) * len(self.tile_shape)
        return 1 if at < 0 else self.tile_shape[at] * in_tiles[at]

    def __getitem__(self, key: Any) -> NkiGrid:
        keys = list(key) if isinstance(key, tuple) else [key]
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys[at : at + 1] = [slice(None)] * (len(self.kept) - len(keys) + 1)
        keys += [slice(None)] * (len(self.kept) - len(keys))
        if len(keys) != len(self.kept):
            raise self._outside(f"{len(keys)} coordinates")
        spans, kept = list(self.spans), []
        for axis, size, k in zip(self.kept, self.shape, keys):
            if isinstance(k, slice):
                first, last, step = k.indices(size)
                kept.append(axis)
                legal = step == 1 and first < last and -size <= (k.stop or 0) <= size
            else:
                first = whole(k, "coordinate of a grid")
                first += size if first < 0 else 0
                last, legal = first + 1, 0 <= first < size
            if not legal:
                raise self._outside(f"coordinate {k}")
            start, stop = spans[axis]
            step = self._step(axis)
            spans[axis] = (start + first * step, min(start + last * step, stop))
        return replace(self, spans=tuple(spans), kept=tuple(kept))

    def _outside(self, what: str) -> Exception:
        return refuse(
            "err_tensor_access_out_of_bound",
            f"{what} of a grid of {self.shape} over {self.backing.label()}, expected coordinates "
            "inside of it in steps of one; loop over range of its shape",
        )

    @property
    def is_data_representable(self) -> bool:
        top, bottom = self.spans[-2]
        return not self.columns or bottom - top <= self.tile_shape[0]

    @property
    def data(self) -> NkiTensor:
        """The selection as one tensor, which instructions take."""
        lead = len(self.spans) - len(self.tile_shape)
        if not self.columns:
            keys: list[Any] = [slice(*span) for span in self.spans]
            for axis in range(lead):
                keys[axis] = keys[axis] if axis in self.kept else self.spans[axis][0]
            return self.backing[tuple(keys)]
        (top, bottom), (left, right) = self.spans[-2:]
        rows, width = self.tile_shape
        if not self.is_data_representable:
            raise refuse(
                "sim_grid_data",
                f"data of {self.element_shape} elements in tiles of {self.tile_shape} in "
                f"{self.buffer}, expected tiles of one row of the grid; index it before .data",
            )
        start = (top // rows * self.columns + left // width) * width
        return self.backing[0 : bottom - top, start : start + right - left]


class NkiTileGrid(NkiGrid):
    """A tensor in coordinates of tiles."""


class NkiBlockGrid(NkiGrid):
    """A tensor in coordinates of blocks of ``block_shape`` tiles."""


def _sizes(given: Any, most: int, what: str, least: int = 2) -> Shape:
    sizes = tuple(wholes(given, what))
    if not least <= len(sizes) <= most or min(sizes) < 1:
        raise refuse(
            "sim_shape",
            f"{what} {given}, expected {least} to {most} positive numbers; write (128, 512)",
        )
    return sizes


def _parts(source: Any, tile_shape: Any) -> tuple[NkiTensor, tuple, tuple, tuple, int]:
    """The parts of a grid over a tensor, or over another grid's selection."""
    if isinstance(source, NkiTensor):
        whole = tuple((0, n) for n in source.shape)
        sizes = _sizes(tile_shape, source.ndim, "tile_shape")
        return source, sizes, whole, tuple(range(source.ndim)), 0
    known = isinstance(source, NkiGrid)
    sizes = (
        _sizes(tile_shape or source.tile_shape, len(source.spans), "tile_shape") if known else ()
    )
    if not known or (source.columns and sizes != source.tile_shape):
        raise refuse(
            "sim_grid",
            f"a grid of tiles {sizes} over a {type(source).__name__}, expected a tensor, or a grid "
            "with the tiles that it was allocated in; give the tensor itself",
        )
    lead = len(source.spans) - len(sizes)
    kept = tuple(a for a in range(len(source.spans)) if a >= lead or a in source.kept)
    return source.backing, sizes, source.spans, kept, source.columns


def tiles(source: Any, *, tile_shape: Any = None) -> NkiTileGrid:
    """``source`` as a grid of tiles of ``tile_shape`` elements along its last axes."""
    return NkiTileGrid(*_parts(source, tile_shape))


def blocks(source: Any, *, tile_shape: Any = None, block_shape: Any) -> NkiBlockGrid:
    """``source`` as a grid of blocks, each of ``block_shape`` tiles."""
    made = _parts(source, tile_shape)
    rank = len(made[1])
    return NkiBlockGrid(*made, _sizes(block_shape, rank, "block_shape", rank))


def alloc_tiles(
    *,
    tile_shape: Any,
    element_shape: Any,
    buffer: Any,
    dtype: Any,
    address: Any = None,
    name: str = "",
) -> NkiTileGrid:
    """A new tensor as a grid of tiles; on chip it takes a place for every whole tile."""
    sizes = _sizes(element_shape, MAX_AXES, "element_shape")
    tile = _sizes(tile_shape, len(sizes), "tile_shape")
    if region(buffer).value not in ("sbuf", "psum"):
        return tiles(ndarray(sizes, dtype, buffer, name, address), tile_shape=tile)
    _sizes(sizes, 2, "element_shape of a grid on chip")
    rows, columns = (-(-n // t) for n, t in zip(sizes, tile))
    backing = ndarray((tile[0], rows * columns * tile[1]), dtype, buffer, name, address)
    return NkiTileGrid(backing, tile, tuple((0, n) for n in sizes), (0, 1), columns)


def alloc_blocks(
    *,
    block_shape: Any,
    tile_shape: Any,
    element_shape: Any,
    buffer: Any,
    dtype: Any,
    address: Any = None,
    name: str = "",
) -> NkiBlockGrid:
    """Allocate tiles as ``alloc_tiles`` does, in coordinates of blocks of ``block_shape`` tiles."""
    what = dict(tile_shape=tile_shape, element_shape=element_shape, buffer=buffer, dtype=dtype)
    return blocks(alloc_tiles(**what, address=address, name=name), block_shape=block_shape)
