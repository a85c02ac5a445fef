"""Tensors of kernels: subscripts, the algebra of views, and access patterns over the storage.

Everything here makes views of the same memory and records nothing. Sources: aws-neuron-sdk v2.32.0,
nki/api/nki/language/__init__.py (NkiTensor), nki/deep-dives/nki-aps.rst,
nki/get-started/about/indexing-overview.rst.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import EllipsisType, NoneType
from typing import Any, NoReturn

from ..device import written
from ..device.dtypes import DType, Shape
from ..device.errors import is_internal, refuse, type_name, warn
from ..device.release import nki_since
from ..device.spec import CORE
from ..device.target import needs
from ..device.unknown import DUNDERS, Foreign, of_call
from ..device.written import arguments, expression, function, numbers, operands, word
from ..instructions.arguments import pairs, whole, wholes
from ..instructions.entry import OpSpec
from ..instructions.gpsimd import INDIRECT_READ, INDIRECT_WRITE, LocalGatherAttrs
from ..language.operands import fitted
from ..program import trace
from ..program.index import is_integer
from ..program.placement import retyped
from ..program.subscript import one_for_each_axis, with_new_axes
from ..program.view import View, called, contiguous, intern
from . import types
from .control import VirtualRegister
from .types import NAMES, MemoryRegion


# --- columns whose offsets are data (gen4) --------------------------------------------------------
# A tile stands for the columns. Their gather precedes each instruction that reads it, their scatter
# follows each that writes it. Sources: aws-neuron-sdk 81ce03ae, nki/api/nki (NkiTensor.indirect,
# nki.isa), nki/guides/architecture/trainium3_arch.rst.
def columns_of(source: View, index: Any, num_elem: Any) -> Any:
    """The tile [P, num_elem] for the columns of ``source`` [P, ...] that ``index`` [P, K] names."""
    count, rows, said = whole(num_elem, "num_elem"), source.shape[0], f"{source.label()}.indirect()"
    if not (isinstance(index, View) and index.dt.is_int and index.shape[0] == rows):
        raise refuse(
            "sim_tensor_indirection",
            f"{said}, expected a tile of {rows} rows of integer offsets; copy them into "
            "one of dtype=nl.int32",
        )
    tracer = trace.current("indirect")
    made = tracer.storage((rows, count), source.dt, source.storage.buffer)
    made.name, made.source = f"{source.storage.name}.indirect", tracer.place()
    tile = tracer.whole(made)

    def move(view: View, op: OpSpec, reads: bool) -> None:
        """Record the gather for ``op``, which reads ``view``, or the scatter of its result."""
        each = CORE.quadrant_partitions if op.multiplies else CORE.gpsimd_partitions
        most = each * index.free_size
        wrong = None
        if rows % each or not 0 < count <= most:
            wrong = f"a multiple of {each} partitions and num_elem from 1 to {most}"
        elif not reads and (op.multiplies or view.size != made.size):
            wrong = "all columns written at once, and no product there"
        if wrong:
            raise refuse(
                "sim_tensor_indirection",
                f"{op.name} with {count} columns of {rows} partitions of {said}, expected {wrong}; "
                "use a tile of its own and nisa.tensor_copy",
            )
        attrs = LocalGatherAttrs(raw=True, free_axes=source.ndim - 1, count=count, each=each)
        columns = tile.reshape((rows, count, 1))
        del tracer.columns[made]  # its own reads and writes are meant as they are
        if reads:
            tracer.emit(INDIRECT_READ, (columns,), (source, index), attrs)
        else:
            tracer.emit(INDIRECT_WRITE, (source,), (columns, index, source), attrs)
        tracer.columns[made] = move

    tracer.columns[made] = move
    return tile


# --- tensors --------------------------------------------------------------------------------------
MAX_AXES = 5
Slice = slice  # the class below has a method of that name
_PLAIN = {int, NoneType, EllipsisType}  # 4.0 is no 4


@lru_cache(1 << 14, typed=True)
def _part(shape: Shape, strides: Shape, chip: bool, *keys: Any) -> tuple[int, Shape, Shape]:
    """Offset, shape and strides of a subscript for each axis.

    Args:
        keys: start, stop and step for each axis; of an integer it, ``...`` and 1.

    Raises:
        LookupError: it reaches outside.
        TypeError: a bound is no int.
    """
    offset, sizes, steps = 0, [], []
    for axis, (size, stride) in enumerate(zip(shape, strides)):
        start, stop, step = keys[3 * axis : 3 * axis + 3]
        if index := stop is ...:
            stop = start + 1
        start, stop = 0 if start is None else start, size if stop is None else stop
        step = 1 if step is None else step
        if not type(start) is type(stop) is type(step) is int:
            raise TypeError
        if step < 1 or not 0 <= start <= stop <= size:
            raise LookupError
        offset += start * stride
        if not index or (chip and not axis):  # a tile never loses its partition axis
            sizes.append(-(-(stop - start) // step))
            steps.append(stride * step)
    least = 2 if chip else 1
    sizes += [1] * (least - len(sizes))
    steps += [1] * (least - len(steps))
    return offset, intern(tuple(sizes)), intern(tuple(steps))


@dataclass(slots=True, eq=False)
class DynamicSlice:
    """``nl.ds(start, size)`` with a start that is known when the kernel runs."""

    start: Any
    size: int


def ds(start: Any, size: int) -> Any:
    """The subscript ``start : start + size``; ``start`` may be a register or a (1, 1) tile."""
    if type(start) is type(size) is int:
        return slice(start, start + size)
    if isinstance(start, (VirtualRegister, View)):
        warn(
            "sim_dynamic_slice",
            f"nl.ds of a {'register' if isinstance(start, VirtualRegister) else 'tile'}: only one "
            "text and the description of subscripts mention such slices, expected "
            f"x.ap(pattern=[[n, {size}], [1, n]], offset=0, indirect_dim=0, scalar_offset="
            f"{''.join(arguments()[0][:1])}) for rows of n elements; here the slice begins there",
            advice=True,
        )
    if isinstance(start, VirtualRegister):
        start = start.static if start.static is not None else start
    if is_integer(start):
        return slice(start, start + whole(size, "size of nl.ds"))
    return DynamicSlice(start, whole(size, "size of nl.ds"))


class NkiTensor(trace.Values, Foreign, View):
    """A tensor in HBM, SBUF or PSUM, or a part of one.

    Attributes:
        shape, strides, offset: as ``View`` has them, in elements of the storage.
        dtype: the element type, a string that equals ``nl.float32`` and so on.
        buffer: the memory, ``nl.sbuf`` and so on.
        name: given with ``name=``, or of the variable that it was assigned to first.
    """

    __slots__ = ()
    scalar_offsets_anywhere = True  # see ``View``
    current_language = True

    @property
    def dtype(self) -> types.Name:
        return NAMES[self.dt.name]

    @property
    def buffer(self) -> MemoryRegion:
        return MemoryRegion(self.storage.buffer)

    @property
    def name(self) -> str:
        return self.storage.name

    @property
    def data(self) -> NkiTensor:
        """The tensor itself, as the ``data`` of grids is one."""
        return self

    # --- subscripts -------------------------------------------------------------------------------
    def __getitem__(self, key: Any) -> NkiTensor:
        keys: Sequence[Any] = key if isinstance(key, tuple) else (key,)
        if len(keys) != len(self.shape) and NoneType not in map(type, keys):
            keys = one_for_each_axis(keys, self)
        dynamic: tuple[int, Any] | None = None
        found = None
        flat: list[Any] = []
        parts: Any = self._parts
        if parts is None:
            parts = self._parts = {}
        try:
            for k in keys:
                flat += (k, ..., 1) if type(k) is int else (k.start, k.stop, k.step)
            made = parts.get(tuple(flat))
            if made is not None and _PLAIN.issuperset(map(type, flat)):
                return made
            found = _part(self.shape, self.strides, self.storage.on_chip, *flat)
        except (AttributeError, TypeError, LookupError):
            pass  # all others, and what is wrong
        if found is None:
            if NoneType in map(type, keys):
                return with_new_axes(self, key, NkiTensor.expand_dim)
            keys = one_for_each_axis(keys, self)
            flat, dynamic = self._plain(keys)
            found = _part(self.shape, self.strides, self.storage.on_chip, *flat)
        offset, sizes, steps = found
        if 0 in sizes:  # a view of nothing, which no instruction takes
            return self._empty(sizes)
        offset += self.offset
        if self.oob is self.by_data is None:
            made = self.__class__(self.storage, offset, sizes, steps, self.dt, self.paxis)
        else:
            indirect = self._sliced_rows(keys) if self.by_data is not None else None
            made = self._with(offset, sizes, steps, None, indirect)
        if dynamic is not None:
            return made._moved(self, *dynamic)
        parts[tuple(flat)] = made
        return made

    def _plain(self, keys: Sequence[Any]) -> tuple[list[Any], tuple[int, Any] | None]:
        """What ``_part`` takes of any subscript, and the axis and start that a register moves."""
        flat: list[Any] = []
        dynamic = None
        for axis, (k, size) in enumerate(zip(keys, self.shape)):
            if isinstance(k, DynamicSlice):
                dynamic, k = (axis, k.start), slice(0, k.size)
            if isinstance(k, (slice, range)):  # nl.affine_range: a kernel of aws-neuron/nkipy ran
                flat += self._range(axis, k)
            elif is_integer(k):
                at = int(k) + size if k < 0 else int(k)
                if not 0 <= at < size:
                    mend = f"count from 0 to {size - 1}, or take all, 0:{size}"
                    raise self._outside(axis, f"index {k}", mend)
                flat += (at, ..., 1)
            else:
                raise refuse(
                    "sim_index_type",
                    f"subscript of type {type_name(k)} of {self.label()}, expected int, slice, "
                    f"nl.ds or '...'; {_instead_of_index(k, self, axis)}",
                )
        return flat, dynamic

    def _range(self, axis: int, k: Slice | range) -> tuple[int, int, int]:
        """(start, stop, step) of a slice, which must lie inside of the axis."""
        size = self.shape[axis]
        for bound in (k.start, k.stop, k.step):
            if bound is not None and not is_integer(bound):
                raise refuse(
                    "sim_index_type",
                    f"slice bound of type {type(bound).__name__} of {self.label()}, expected an "
                    "integer known while building; divide sizes with //, and give what is known at "
                    "run time as nl.ds(register, size)",
                )
        step = 1 if k.step is None else int(k.step)
        start = 0 if k.start is None else int(k.start)
        stop = size if k.stop is None else int(k.stop)
        start, stop = (v + size if v < 0 else v for v in (start, stop))
        if start < 0 or stop > size:
            mend = f"end it at {size}, a loop's last step at min(stop, {size}), and take as much of"
            mend += " the tile beside it"
            if start >= size:
                mend = f"begin below {size}, at most at {size - 1}: a loop has too many steps or "
                mend += "counts from 1, or an offset is too large"
            elif start < stop - start <= size and "ds(" in expression():
                count = stop - 2 * start
                mend = f"nl.ds takes a start and a size, no end: nl.ds({start}, {count})"
            elif 0 < (lacks := self.ndim - len(written.subscripts())) < self.ndim - (size > 1) and (
                stop <= max(self.shape[axis + 1 :], default=0)  # it fits an axis behind
            ):
                every = expression().replace("[", "[" + ("i, " if size > 1 else "0, ") * lacks, 1)
                mend = f"give each of the {self.ndim} axes an index, {every}"
            elif stop - start > size:
                mend = f"take at most {size} of this axis, or make it longer"
            what = f"index range {k.start or 0}:{stop if k.stop is None else k.stop}"
            raise self._outside(axis, what, mend)
        if step < 1 or start > stop:
            turned = self.get_pattern()
            turned[axis][0] *= -1
            raise refuse(
                "sim_empty_slice",
                f"slice {k.start}:{k.stop}:{k.step} of axis {axis} of {self.label()} is empty, "
                "expected start < stop and a positive step; "
                + (
                    f"backwards it is {called(self)}.ap(pattern={turned}, "
                    f"offset={(size - 1) * self.strides[axis]})"
                    if step < 0
                    else f"begin at 0 or later: {k.start} counts from the end"
                    if (k.start or 0) < 0
                    else f"begin below {size}, or name each axis, as [:, {start}:]"
                    if start > size
                    else f"write start:start + size, {start}:{start + stop}, or skip the empty step"
                ),
            )
        return start, stop, step

    def _empty(self, shape: Shape) -> NkiTensor:
        bounds = ((0,) * len(shape), 0, 0)
        return super()._with(self.offset, intern(shape), intern(contiguous(shape)), (bounds,), None)

    def _outside(self, axis: int, what: str, mend: str) -> Exception:
        where = numbers()
        what += f" ({where})" if where else ""
        return refuse(
            "err_tensor_access_out_of_bound",
            f"Out-of-bound access for tensor {self.label()} on dimension {axis}: {what} exceeds "
            f"dimension size {self.shape[axis]}, expected indices inside of it; {mend}",
        )

    def _sliced_rows(self, keys: Sequence[Any]) -> Any:
        """Rows that data choose go with the axis that they were chosen for."""
        assert self.by_data is not None
        if self.by_data[0].size != 1 and keys[0] != slice(None):
            raise refuse(
                "sim_indirect_axis",
                f"subscript of axis 0 of {self.label()}, whose rows data choose, expected ':' "
                "there; slice the index tile instead",
            )
        return self.by_data

    def _moved(self, base: View, axis: int, start: Any) -> NkiTensor:
        """The view at a run-time offset along an axis of ``base``."""
        if self.by_data is not None:
            raise refuse(
                "sim_indirect_twice",
                f"{self.label()} has a run-time offset already, expected one for a tensor; add "
                "the indices in a tile first",
            )
        stride, length = base.strides[axis], base.shape[axis]
        if isinstance(start, VirtualRegister):
            if start.static is not None:
                offset = self.offset + start.static * stride
                return self._with(offset, self.shape, self.strides, None, None)
            start = start.tile
        span = self.shape[axis] - 1 if self.ndim == base.ndim else 0
        tile = _index_tile(start, 1)
        return self._with(
            self.offset, self.shape, self.strides, None, (tile, stride, length, (0, span))
        )

    # --- views by name ----------------------------------------------------------------------------
    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Elements ``start`` to ``end`` of one axis in steps."""
        dim = self._axis(dim)
        keys = [slice(None)] * self.ndim
        keys[dim] = slice(start, end, step)
        return self[tuple(keys)]

    def select(self, dim: int, index: Any) -> NkiTensor:
        """One index of an axis, which goes; a register or a (1, 1) tile selects at run time."""
        dim = self._axis(dim)
        if self.storage.on_chip and dim == 0 and not is_integer(index):
            raise self._wrong_axis("select at run time", dim)
        keys: list[Any] = [slice(None)] * self.ndim
        keys[dim] = int(index) if is_integer(index) else 0
        made = self[tuple(keys)]
        return made if is_integer(index) else made._moved(self, dim, index)

    def vector_select(self, dim: int, vector_offset: Any) -> NkiTensor:
        """Rows of an HBM tensor by data: row p of the result is row ``vector_offset[p]``."""
        if self.storage.on_chip or dim != 0:
            raise self._wrong_axis("vector_select", dim)
        tile = _index_tile(vector_offset, None)
        shape = (tile.shape[0], *self.shape[1:])
        indirect = (tile, self.strides[0], self.shape[0], (0, 0))
        return self._with(
            self.offset, intern(shape), intern((0, *self.strides[1:])), None, indirect
        )

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        """The axes in another order; on chip the partition axis stays first."""
        order = tuple(self._axis(d) for d in dims)
        if sorted(order) != list(range(self.ndim)) or (self.storage.on_chip and order[0] != 0):
            raise refuse(
                "sim_permute",
                f"permute({list(dims)}) of {self.label()}, expected every axis once"
                f"{', the partition axis first' if self.storage.on_chip else ''}; move data across "
                "partitions with nisa.nc_transpose",
            )
        return self._rearranged([self.shape[d] for d in order], [self.strides[d] for d in order])

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """An axis of size 1 as one of ``size`` with stride 0; on chip not the partition axis."""
        dim = self._free_axis(dim, "broadcast")
        if self.shape[dim] != 1:
            shape = (*self.shape[:dim], 1, *self.shape[dim:])
            ones = [k for k, count in enumerate(self.shape) if count == 1]
            mend = f"write {called(self)}.reshape({shape}).broadcast({dim}, {size})"
            if self.shape[dim] == size:
                mend = "leave it out: the axis has this size"
            elif ones:
                mend = f"axis {ones[-1]} has one element: {called(self)}.broadcast({ones[-1]}, n)"
            raise refuse(
                "sim_broadcast",
                f"broadcast of axis {dim} of {self.label()}, expected size 1, got "
                f"{self.shape[dim]}; {mend}",
            )
        return self._replaced(dim, [whole(size, "size of a broadcast")], [0])

    def expand_dim(self, dim: int) -> NkiTensor:
        """A new axis of size 1 at ``dim``; on chip not before the partition axis."""
        dim = whole(dim, "axis of expand_dim")
        at = dim if dim >= 0 else dim + self.ndim + 1
        if not 0 <= at <= self.ndim:
            raise refuse(
                "sim_view_axis",
                f"expand_dim of axis {dim} of {self.label()}, expected 1 to {self.ndim}; give "
                f"{self.ndim} for a last axis",
            )
        if self.storage.on_chip and at == 0:
            mend = "a row is (1, n) already, and a reduction's result a column (P, 1)"
            raise self._wrong_axis("expand_dim", dim, mend)
        return self._replaced(at, [1], [0], of=0)

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Without an axis of size 1."""
        dim = self._free_axis(dim, "squeeze_dim")
        if self.shape[dim] != 1:
            raise refuse(
                "sim_squeeze",
                f"squeeze_dim({dim}) of {self.label()}, expected size 1 there, got "
                f"{self.shape[dim]}; for another shape use reshape(shape)",
            )
        return self._replaced(dim, [], [])

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """One axis split into several, one of them possibly -1."""
        dim = self._free_axis(dim, "reshape_dim")
        parts = _filled(shape, self.shape[dim], self)
        steps = [self.strides[dim] * s for s in contiguous(tuple(parts))]
        return self._replaced(dim, parts, steps)

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Axes ``start_dim`` to ``end_dim`` as one; their strides must allow that."""
        first, last = self._free_axis(start_dim, "flatten_dims"), self._axis(end_dim)
        merged = math.prod(self.shape[first : last + 1])
        return self.reshape((*self.shape[:first], merged, *self.shape[last + 1 :]))

    def reshape(self, shape: Sequence[int], *more: int) -> NkiTensor:
        """View with other sizes, one possibly -1; on chip the partition axis stays unchanged."""
        sizes: Any = (shape, *more) if is_integer(shape) else shape
        return super().reshape(tuple(_filled(sizes, self.size, self)))

    def rearrange(
        self, src_pattern: Any, dst_pattern: Any, fixed_sizes: dict[str, int] | None = None
    ) -> NkiTensor:
        """Axes by name: ``(("h", "d"), "s")`` to ``("h", "s", "d")``; tuples split and merge."""
        names: list[str] = []
        split: list[int] = []
        sizes = dict(fixed_sizes or {})
        if len(src_pattern) != self.ndim:
            raise refuse(
                "sim_rearrange",
                f"rearrange of {self.label()} from {src_pattern}, expected {self.ndim} entries; "
                "name each axis once, and joined ones in a tuple",
            )
        for size, entry in zip(self.shape, src_pattern):
            parts = (entry,) if isinstance(entry, str) else tuple(entry)
            names += parts
            split += _filled([sizes.get(n, -1) for n in parts], size, self)
        known = dict(zip(names, split))
        flat = [n for entry in dst_pattern for n in ((entry,) if isinstance(entry, str) else entry)]
        if sorted(flat) != sorted(names):
            raise refuse(
                "sim_rearrange",
                f"rearrange of {self.label()} from {src_pattern} to {dst_pattern}, expected the "
                "same names on both sides; every axis goes somewhere",
            )
        merged = [
            known[e] if isinstance(e, str) else math.prod(known[n] for n in e) for e in dst_pattern
        ]
        return self.reshape(split).permute([names.index(n) for n in flat]).reshape(merged)

    def view(self, dtype: Any) -> NkiTensor:
        """The same bits as another type: the last axis grows or shrinks with the type's size."""
        dt = types.element_type(dtype)
        return self.bitcast(dt) if dt.itemsize == self.dt.itemsize else self._as_other_size(dt)

    def _as_other_size(self, dt: DType) -> NkiTensor:
        old, new = self.dt.itemsize, dt.itemsize
        counts = [self.shape[-1], self.offset, *self.strides[:-1]]
        whole = all(n * old % new == 0 for n in counts) and self.storage.size * old % new == 0
        if (self.strides[-1] != 1 and self.shape[-1] != 1) or not whole or self.by_data is not None:
            raise refuse(
                "sim_view_dtype",
                f"view of {self.label()} as {dt}, expected a contiguous last axis of whole "
                f"elements of {new} bytes; make it dense with nisa.tensor_copy first",
            )
        width, offset, *strides = (n * old // new for n in counts)
        same = retyped(self.storage, dt)
        shape = (*self.shape[:-1], width)
        return type(self)(same, offset, intern(shape), intern((*strides, 1)), dt)

    reinterpret_cast = view

    # --- access patterns --------------------------------------------------------------------------
    def ap(
        self,
        pattern: Any,
        offset: Any = None,
        scalar_offset: Any = None,
        vector_offset: Any = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> NkiTensor:
        """Any pattern over the storage: element (i, j, ...) is ``offset + i * s0 + j * s1 + ...``.

        The storage is addressed, whatever the view is; an offset of None is the view's. Up to 2.30
        a part counts by itself: its offset is added, its own width steps from row to row (so
        nki-library at d2ad3a5, mlp_tkg with biases and column tiling; 2.31's guide says otherwise).
        ``scalar_offset`` (a register or a (1, 1) tile) moves the pattern along ``indirect_dim`` of
        the tensor, ``vector_offset`` (P, 1) chooses a row of it for each partition.
        """
        storage = self.storage
        # Indices count along the tensor's own axes, or those that a reshape has given all of it.
        full = self.is_full()
        base = self.shape if full else storage.shape
        alone = not full and not nki_since("2.31")
        if offset is not None and self.offset and (alone or int(offset) != self.offset):
            warn(
                "sim_ap_offset",
                f"ap(offset={offset}) of the part {self.label()}: sources disagree whether it "
                "replaces the part's own offset or adds to it, expected a whole tensor; here it "
                "adds up to SDK 2.30 and replaces later",
            )
        if dtype is not None and types.element_type(dtype).itemsize != self.dt.itemsize:
            dt = types.element_type(dtype)
            split = full and self.shape[-1] * self.dt.itemsize % dt.itemsize == 0
            other = self.view(dt) if split else type(self).whole(retyped(storage, dt))
            if offset is None or alone:
                offset = (offset or 0) + _in_elements(self, dt)
            return other.ap(pattern, offset, scalar_offset, vector_offset, indirect_dim)
        steps = pairs(pattern, "ap pattern")
        shape: Shape
        strides, shape = zip(*steps) if steps else ((), ())
        start = self.offset if offset is None else _known(offset) + alone * self.offset
        if storage.on_chip:
            if alone and strides[0] == math.prod(self.shape[1:]):
                strides = (storage.free_size, *strides[1:])
            self._check_partition_pair(strides, shape)
        if scalar_offset is not None and vector_offset is not None:
            raise refuse(
                "sim_indirect_twice",
                f"ap of {self.label()} with scalar_offset and vector_offset, expected one of them; "
                "leave the other out",
            )
        row = 0 if scalar_offset is vector_offset is None else math.prod(base[indirect_dim + 1 :])
        if isinstance(scalar_offset, VirtualRegister):
            if scalar_offset.static is not None:
                start += scalar_offset.static * row
                scalar_offset = None
            else:
                scalar_offset = scalar_offset.tile
        indirect = None
        if vector_offset is not None:
            if storage.on_chip or indirect_dim != 0:
                raise self._wrong_axis("ap(vector_offset=)", indirect_dim)
            strides = (0, *strides[1:])
        if scalar_offset is not None or vector_offset is not None:
            tile = _index_tile(
                *((scalar_offset, 1) if vector_offset is None else (vector_offset, shape[0]))
            )
            # Indices that keep the pattern inside: of the memory, on chip of each partition.
            room = storage.free_size if storage.on_chip else storage.size
            steps = [(n, s) for n, s in zip(shape, strides) if not storage.on_chip or s != room]
            last = start % room + sum((n - 1) * s for n, s in steps)
            length = min(base[indirect_dim], (room - 1 - last) // row + 1)
            indirect = (tile, row, length, (0, 0))
            if storage.on_chip and indirect_dim == 0:
                raise self._wrong_axis("ap(scalar_offset=)", 0)
        outside = None if indirect else self._reach(start, shape, strides)
        made = self.__class__(
            storage, start, intern(shape), intern(strides), self.dt, self.paxis, outside, indirect
        )
        return made if dtype is None else made.bitcast(types.element_type(dtype))

    def indirect(self, index: Any, num_elem: int | None = None) -> NkiTensor:
        """[P, num_elem] columns at free offsets that ``index`` [P, K] names (gen4)."""
        needs("NkiTensor.indirect", 4)
        return columns_of(self, index, index.size if num_elem is None else num_elem)

    def _check_partition_pair(self, strides: Shape, shape: Shape) -> None:
        """On chip the first pair walks the partitions, one by one."""
        free = self.storage.free_size
        if len(shape) < 2 or (shape[0] > 1 and strides[0] != free):
            raise refuse(
                "sim_partition_stride",
                f"ap of {self.label()} begins with {[strides[0], shape[0]]}, expected the "
                f"partition pair [{free}, n] and at least one more: partitions cannot be skipped; "
                f"write pattern=[[{free}, {strides[0] if shape[0] == free else shape[0]}], [1, n]]",
            )

    def _reach(self, start: int, shape: Shape, strides: Shape) -> Any:
        """The condition that a region breaks if it leaves the storage; None where it stays inside.

        Users of the region ask (``check_bounds``): the compiler checks accesses, not views.
        """
        low, high = _extent(start, shape, strides)
        inside = low >= 0 and high < self.storage.size
        return None if inside else ((strides, start, self.storage.size),)

    def _with(
        self, offset: int, shape: Shape, strides: Shape, oob: Any, indirect: Any
    ) -> NkiTensor:
        if self.oob and indirect is None:  # a part may stay inside of what its whole leaves
            oob = self._reach(offset, shape, strides)
        return super()._with(offset, shape, strides, oob, indirect)

    def check_bounds(self) -> None:
        for strides, start, size in self.oob or ():
            if 0 in self.shape:
                raise refuse(
                    "sim_empty_slice",
                    f"{self.label()} is used, which has no elements, expected some: a compiler of "
                    "SDK 2.31 ended in an internal error; write start:start + size, as a range "
                    "ends before its second number, or leave out a step that has none",
                )
            low, high = _extent(start, self.shape, strides)
            raise refuse(
                "sim_ap_out_of_bound",
                f"ap of {self.label()} reaches elements {low} to {high}, expected 0 to {size - 1} "
                f"of its storage; {self._within(high - low, low, size)}",
            )

    def _within(self, reach: int, low: int, size: int) -> str:
        """What keeps a pattern that begins at ``low`` inside of ``size`` elements."""
        steps = self.get_pattern()
        if low == 0 and math.prod(self.shape[1:]) == size:
            return f"a row for all partitions has step 0: write {[[0, steps[0][1]], *steps[1:]]}"
        if low > 0 and reach < size:
            return f"lower the offset by {low + reach + 1 - size}"
        return "lower the counts, the second of each [step, count]"

    def get_pattern(self) -> list[list[int]]:
        """``[[stride, count], ...]``, as ``ap`` takes it."""
        return [[s, n] for s, n in zip(self.strides, self.shape)]

    def is_contiguous(self) -> bool:
        """Whether the view is dense and row-major; on chip within each partition."""
        first = 1 if self.storage.on_chip else 0
        want = contiguous(self.shape)
        return all(
            n == 1 or s == w
            for n, s, w in zip(self.shape[first:], self.strides[first:], want[first:])
        )

    def is_indirect(self) -> bool:
        """Whether data choose the view's elements."""
        return self.by_data is not None or self.storage in trace.current("tensor").columns

    # --- helpers ----------------------------------------------------------------------------------
    def _rearranged(self, shape: Sequence[int], strides: Sequence[int]) -> NkiTensor:
        sizes = intern(tuple(shape))
        if len(sizes) > MAX_AXES:
            raise refuse(
                "sim_rank",
                f"view of {self.label()} with shape {sizes}, expected at most {MAX_AXES} axes; "
                "join axes with reshape(shape)",
            )
        return self._with(self.offset, sizes, intern(tuple(strides)), None, self.by_data)

    def _replaced(self, at: int, sizes: list[int], steps: list[int], of: int = 1) -> NkiTensor:
        """The view with other axes instead of ``of`` axes from ``at`` on."""
        shape, strides = list(self.shape), list(self.strides)
        shape[at : at + of] = sizes
        strides[at : at + of] = steps
        return self._rearranged(shape, strides)

    def _axis(self, dim: int) -> int:
        dim = whole(dim, "axis of a view")
        at = dim + self.ndim if dim < 0 else dim
        if not 0 <= at < self.ndim:
            raise refuse(
                "sim_index_rank",
                f"axis {dim} of {self.label()}, expected 0 to {self.ndim - 1}; count from 0, or "
                "from the end as -1",
            )
        return at

    def _free_axis(self, dim: int, what: str) -> int:
        at = self._axis(dim)
        if at == 0 and self.storage.on_chip:
            raise self._wrong_axis(what, dim)
        return at

    def _wrong_axis(self, what: str, dim: int, mend: str = "") -> Exception:
        where = "only axis 0 of a tensor in HBM"
        if self.storage.on_chip:
            where = "on chip the partition axis stays as it is"
            mend = mend or (
                "copy over partitions with nl.broadcast_to, or turn the tile with nisa.nc_transpose"
            )
        return refuse(
            "sim_view_axis",
            f"{what} of axis {dim} of {self.label()}, expected another axis: {where}"
            + (f"; {mend}" if mend else ""),
        )

    # --- data and truth ---------------------------------------------------------------------------
    def __bool__(self) -> bool:
        """True: there is a tensor, and not None. AWS's library asks so for optional arguments."""
        error = refuse(
            "sim_tensor_truth",
            f"{self.label()} is used as a truth value, expected '{called(self)} is not None': a "
            "tensor counts as true whatever it holds; choose by contents with "
            "nl.where(condition, a, b), or loop by a register with nl.while_loop",
        )
        if word() == "while":  # which would not end
            raise error
        warn(error.identifier, error.message, advice=not self.storage.on_chip)
        return True

    def __iter__(self) -> NoReturn:
        name, at = called(self), int(self.on_chip)
        use = of_call(True) or (
            f"loop over range({name}.shape[{at}]) and take {name}[{':, ' * at}i:i + 1] in it, "
            "or reduce and search whole tiles with nl.sum, nl.max and nisa.max8"
        )
        raise refuse(
            "sim_tensor_iteration",
            f"{self.label()} is iterated over, expected a loop over a range that slices it; "
            + (use if use.startswith("loop") else f"use {use}"),
        )

    def _no_number(self) -> NoReturn:
        host = (
            "functions of nl, nl.exp for math.exp" if self.on_chip else "a Python argument for it"
        )
        use = f"{of_call(True) or host}, give the tile itself as operand0= or scale=, or read a "
        use += "number with nisa.register_load"
        if function() == "range":
            use = "a mask, or nl.fori_loop(0, register, body) with nisa.register_load of "
            use += f"{called(self)}, which trn2 and trn3 take in a kernel[2]"
        raise refuse(
            "sim_foreign_call",
            f"a Python number (int, float, a size) is asked of {self.label()}, expected one known "
            f"while tracing, when tensors have no values; use {use}",
        )

    __int__ = __float__ = __index__ = _no_number

    def __eq__(self, other: object) -> bool:
        """Identity, as everywhere in Python: whoever compares values is told."""
        values = other is not self and isinstance(other, (View, int, float))
        if values and not is_internal(sys._getframe(1).f_code.co_filename):
            warn(
                "sim_tensor_operator",
                f"== and != compare which tile {self.label()} is, expected 'is' for that; for "
                "values use nl.equal(x, y) or nl.not_equal(x, y), and nl.where to choose",
                advice=True,
            )
        return self is other

    __hash__ = object.__hash__


POWERS = "nl.square(x), nl.sqrt(x) or nisa.tensor_scalar with op0=nl.power and operand0=y"
_COMPARED = ("less", "less_equal", "greater", "greater_equal")


def _operator(name: str, swapped: bool) -> Callable[..., NoReturn]:
    """The refusal of one of Python's operators, with the function ``nl.name`` that does it."""

    def refuse_it(self: NkiTensor, *others: Any) -> NoReturn:
        texts = operands(name) or ["x", "y"][: 1 + len(others)]
        other = others[0] if others else None
        if isinstance(other, View) and (self.shape[0] == 1) != (other.shape[0] == 1):
            row, wide = (self, other) if self.shape[0] == 1 else (other, self)
            at = (row is other) != swapped
            texts[at] = f"nl.broadcast_to({texts[at]}, {(wide.shape[0], *row.shape[1:])})"
        bits = name.replace("logical", "bitwise").replace("bitwise_not", "invert")
        own = bits if self.dt.is_int else name
        use = f"write nl.{own}({', '.join(texts)})"
        if name == "divide" and (swapped or isinstance(other, View)):
            inverse = f"nl.reciprocal({texts[1]})"
            use = f"write {inverse if other == 1 else f'nl.multiply({texts[0]}, {inverse})'}"
        elif name == "divide":
            use = f"write nl.multiply({texts[0]}, 1 / ({texts[1]}))"
        by = f"{use} (1.0 where it holds), and choose with nl.where(condition, a, b), not with if"
        if word() == "while":
            use = "loop over range(n) with a number of steps: no loop ends by a tile's values"
        elif name in _COMPARED:
            use = by
        elif others:
            use += " for a new tile, where nisa.tensor_scalar and nisa.tensor_tensor write a dst"
        if name == "power" and not isinstance(other, View):
            use = f"write {POWERS}"
        if name == "add" and self.buffer is getattr(other, "buffer", None) is types.psum:
            use = f"write nisa.nc_matmul(dst={texts[0]}, ...) alone: products add up in their dst"
        if function() in ("sum", "reduce"):
            named = {"max": "maximum", "min": "minimum"}.get(arguments()[0][0], name)
            use = f"combine two at a time in a loop, nl.{named}(x, y)"
        elif others and not operands():  # max(x, y)
            use = f"use {of_call(True) or f'nl.{name}(x, y)'}"
        if not self.storage.on_chip:
            use = f"load the part that is meant, tile = nl.load({called(self)}[0:128]), for that"
            start = texts[not swapped]
            if name == "add" and self.size == 1 and self.dt.is_int:  # a place in another tensor
                use = "give the place as data, table.ap(pattern, vector_offset=nl.load("
                use += f"{called(self)}.reshape((1, 1))), indirect_dim=0), or as a Python number"
            elif name == "add" and is_integer(other):  # a pointer's sum
                use = f"take n elements from there, {called(self)}[{start}:{start} + n]"
            elif name == "add" and isinstance(other, (Slice, DynamicSlice)):
                use = f"take them from there, {called(self)}[{start}]"
        elif hasattr(other, "depends_on"):  # of an instruction
            use = "write the call alone: it writes its dst, and nc_matmul adds to what dst holds"
        elif getattr(other, "ndim", 0) and not isinstance(other, View):
            use = f"pass the array to the kernel, load it with nl.load, and use nl.{name}(x, y)"
        raise refuse(
            "sim_tensor_operator",
            f"binary operators on tensors are not supported, got one on {self.label()}; {use}",
        )

    return refuse_it


for _name, _function in DUNDERS.items():
    for _form in (f"__{_name}__", f"__r{_name}__"):
        setattr(NkiTensor, _form, _operator(_function, _form.startswith("__r")))

for _name in ("view", "permute", "reshape", "broadcast", "slice", "select", "ap"):
    setattr(NkiTensor, _name, fitted(getattr(NkiTensor, _name)))


def _instead_of_index(k: Any, view: NkiTensor, axis: int) -> str:
    """What to write for a subscript that is none."""
    name = called(view)
    if isinstance(k, float):
        return f"write a whole number: divide with //, or int({k})"
    texts = written.subscripts()
    index = texts[min(axis, len(texts) - 1)]
    if isinstance(k, View):
        if not view.on_chip:
            rows = (k if k.on_chip else k.storage).shape[0]
            column = f".reshape(({rows}, 1))" if len(k.storage.shape) == 1 else ""
            index = index if k.on_chip else f"nl.load({called(k)}{column})"
            pattern = [[view.strides[0], rows], *view.get_pattern()[1:]]
            return (
                f"load the rows that it names, nisa.dma_copy(dst=tile, src={name}.ap({pattern}, "
                f"vector_offset={index}, indirect_dim=0))"
            )
        if k.dt.itemsize == 1 or k.dt.is_float:
            return f"choose with nl.where({index}, tile, other): no shape depends on data"
        if any(isinstance(node, ast.AugAssign) for node in written.nodes()):
            return (
                f"count each value v in a loop, nl.sum(nl.equal({index}, v), axis=1), and copy it "
                f"to {name}[:, v:v + 1]"
            )
        alone = k.shape[0] == 1 < view.shape[0]
        index = index.partition("[")[0] if alone else index
        return (
            "an element of its own in each row is"
            + ", of all rows at once," * alone
            + f" nl.gather_flattened({name}, nl.copy({index}, dtype=nl.uint32))"
        )
    if isinstance(k, VirtualRegister):
        pattern = [[s, 1 if at == axis else n] for at, (s, n) in enumerate(view.get_pattern())]
        return f"write {name}.ap({pattern}, scalar_offset={index}, indirect_dim={axis})"
    return (
        f"write a range of neighbours, {name}[0:n], a step, {name}[0:n:2], or gather rows of a "
        "tensor in HBM with .ap(pattern, vector_offset=index_tile, indirect_dim=0)"
    )


def _extent(start: int, shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """The first and the last element that a pattern reaches."""
    low = high = start
    for n, s in zip(shape, strides):
        if s > 0:
            high += (n - 1) * s
        else:
            low += (n - 1) * s
    return low, high


def _filled(shape: Sequence[int], size: int, view: View) -> list[int]:
    """Sizes with a -1 among them computed; refuses another product than ``size``."""
    sizes = wholes(shape, "shape")
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = size // max(1, -math.prod(sizes))
    if math.prod(sizes) != size or min(sizes, default=1) < 1:
        raise refuse(
            "sim_reshape",
            f"shape {tuple(shape)} for {size} elements of {view.label()}, expected as many; "
            + (
                f"axis 0, the partitions, stays: write {(view.shape[0], view.free_size)}"
                if view.on_chip and len(sizes) == 2 and sizes[0] != view.shape[0]
                else f"write sizes whose product is {size}, -1 for one to be computed"
            ),
        )
    return sizes


def _in_elements(view: View, dt: DType) -> int:
    """The offset of a view in elements of another size."""
    count, rest = divmod(view.offset * view.dt.itemsize, dt.itemsize)
    if rest:
        raise refuse(
            "sim_view_dtype",
            f"ap of {view.label()} with dtype={dt}, expected a part that begins at a whole element "
            f"of {dt.itemsize} bytes; name offset=",
        )
    return count


def _known(offset: Any) -> int:
    if isinstance(offset, VirtualRegister) and offset.static is not None:
        return offset.static
    return whole(offset, "offset of an ap")


def _index_tile(given: Any, rows: int | None) -> View:
    """A tile that chooses at run time: (1, 1), or (rows, 1) for a vector of them."""
    wrong = ""
    if not isinstance(given, View) or given.storage.buffer != "sbuf":
        wrong = "a tile in sbuf"
    elif given.dt.name not in ("int32", "uint32"):
        wrong = "int32 or uint32"
    elif given.free_size != 1 or (rows is not None and given.shape[0] != rows):
        wrong = f"shape ({'P' if rows is None else rows}, 1), as many as the first pair counts"
    if wrong:
        got = given.label() if isinstance(given, View) else type(given).__name__
        raise refuse(
            "sim_index_tile",
            f"run-time offset {got}, expected {wrong}; "
            + (
                f"write a whole number, int({given}), or divide with // where it is computed"
                if isinstance(given, float)
                else "copy the indices into such a tile first, as nl.copy(nl.load(indices_hbm), "
                "dtype=nl.int32), or give pairs as [step, count]"
            ),
        )
    return given
