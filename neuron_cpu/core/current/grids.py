"""Tensors cut into tiles, and tiles into blocks (SDK 2.33): ``nl.tiles`` and ``nl.blocks``.

Grids are views: they record nothing. Tiles of a grid that ``alloc_tiles`` made on chip lie side by
side: tile (i, j) of n columns begins at column (i n + j) width, whatever the tiles at the edge use.
Source: awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated, nki.language.tiles,
blocks, alloc_tiles, alloc_blocks and NkiGrid; no public kernel uses them yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..device.errors import refuse
from ..instructions.arguments import whole, wholes
from .creation import ndarray
from .tensor import MAX_AXES, NkiTensor
from .types import MemoryRegion, Name, region

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
    tile_shape: tuple[int, ...]
    spans: tuple[Span, ...]
    kept: tuple[int, ...]
    columns: int = 0
    block_shape: tuple[int, ...] = ()

    @property
    def dtype(self) -> Name:
        return self.backing.dtype

    @property
    def buffer(self) -> MemoryRegion:
        return self.backing.buffer

    @property
    def element_shape(self) -> tuple[int, ...]:
        """Elements of each axis, without leading axes that an index has consumed."""
        lead = len(self.spans) - len(self.tile_shape)
        axes = [a for a in range(len(self.spans)) if a >= lead or a in self.kept]
        return tuple(self.spans[a][1] - self.spans[a][0] for a in axes)

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = [(self.spans[a], self._step(a)) for a in self.kept]
        return tuple(-(-(stop - start) // step) for (start, stop), step in sizes)

    @property
    def index_step_elements(self) -> tuple[int, ...]:
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
            "inside of it in steps of one",
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


def _sizes(given: Any, most: int, what: str, least: int = 2) -> tuple[int, ...]:
    sizes = tuple(wholes(given, what))
    if not least <= len(sizes) <= most or min(sizes) < 1:
        raise refuse("sim_shape", f"{what} {given}, expected {least} to {most} positive numbers")
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
            "with the tiles that it was allocated in",
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
    *, tile_shape: Any, element_shape: Any, buffer: Any, dtype: Any, address: Any = None,
    name: str = "",
) -> NkiTileGrid:  # fmt: skip
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
    *, block_shape: Any, tile_shape: Any, element_shape: Any, buffer: Any, dtype: Any,
    address: Any = None, name: str = "",
) -> NkiBlockGrid:  # fmt: skip
    """Allocate tiles as ``alloc_tiles`` does, in coordinates of blocks of ``block_shape`` tiles."""
    what = dict(tile_shape=tile_shape, element_shape=element_shape, buffer=buffer, dtype=dtype)
    return blocks(alloc_tiles(**what, address=address, name=name), block_shape=block_shape)
