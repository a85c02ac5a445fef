"""Views: the elements of a storage that an operand has, without their values.

A view is storage + element offset + sizes + strides, everything counted in elements. On chip the
first axis of a *tile* is the partition axis; views of tensors with block dimensions have ``paxis``
block axes before it and must be indexed down to a tile before an instruction takes them
(aws-neuron-sdk v2.21.1, nki.errors.rst, err_failed_to_infer_tile_from_local_tensor).

A front end gives kernels a subclass with subscripts and operators; every method here makes views of
the class it is called on, so that a kernel's tensor stays the front end's own.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeVar

import numpy as np

from ..device import written
from ..device.dtypes import DType, Shape, to_dtype
from ..device.errors import refuse, user_frame
from .storage import Storage

V = TypeVar("V", bound="View")
Bound = tuple[Shape, int, int]
Indirect = tuple["View", int, int, tuple[int, int]]

FIRST_BLOCK = range(1)
nothings: set[type] = set()  # classes of views that select nothing
_interned: dict[Shape, Shape] = {}
_forms: dict[tuple, tuple] = {}


def intern(values: Shape) -> Shape:
    """One shared tuple per value: programs hold few distinct shapes and many views."""
    return _interned.setdefault(values, values)


@functools.cache
def contiguous(shape: Shape) -> Shape:
    """Row-major strides, in elements."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return intern(tuple(strides[::-1]))


@functools.cache
def _fills(shape: Shape, strides: Shape, size: int) -> bool:
    """Whether a region is contiguous and has as many elements as its storage."""
    usual = contiguous(shape)  # the stride of a single element is never taken
    steps = all(n == 1 or a == b for n, a, b in zip(shape, strides, usual))
    return steps and math.prod(shape) == size


@functools.cache
def _stretched(own: Shape, strides: Shape, shape: Shape) -> Shape | None:
    """Strides with which ``own`` counts as ``shape``, None where it does not broadcast."""
    if len(own) != len(shape) or any(o not in (1, s) for o, s in zip(own, shape)):
        return None
    return intern(tuple(0 if o != s else t for o, s, t in zip(own, shape, strides)))


@functools.cache
def _reach(shape: Shape, strides: Shape) -> int:
    """The distance from the first element to the last."""
    return sum((n - 1) * stride for n, stride in zip(shape, strides))


@functools.cache
def _nothing_of(kind: Any) -> Any:
    made = type(kind.__name__, (kind,), {"__slots__": (), "selects_nothing": True})
    nothings.add(made)
    return made


class View:
    """A region of a tensor in HBM, SBUF or PSUM.

    Attributes:
        storage: the memory that the region lies in.
        offset: element of the storage that the first element of the region is.
        shape, strides: size of each axis and its step in elements of the storage.
        dt: element type; another one than the storage's after ``bitcast``.
        paxis: block axes before the partition axis.
        oob: bounds that the region may break, as (coefs, const, size) for
            ``0 <= const + coefs . axes < size``; None where every element is known to be inside.
            Whether they matter is known only once a mask has cut the region.
        by_data: rows chosen by data, as (index tile, element stride of one index step, length of
            the axis, least and greatest of the affine index that is added to the data).
    """

    __slots__ = (
        "_blocks",
        "_form",
        "_parts",
        "by_data",
        "dt",
        "offset",
        "oob",
        "paxis",
        "shape",
        "storage",
        "strides",
    )
    selects_nothing = False  # see ``nothing``
    scalar_offsets_anywhere = False  # every instruction takes one run-time offset of such a view

    def __init__(
        self,
        storage: Storage,
        offset: int,
        shape: Shape,
        strides: Shape,
        dt: DType | None = None,
        paxis: int = 0,
        oob: tuple[Bound, ...] | None = None,
        indirect: Indirect | None = None,
    ) -> None:
        self.storage, self.offset = storage, offset
        self.shape, self.strides = shape, strides
        self.dt = storage.dtype if dt is None else dt
        self.paxis, self.oob, self.by_data = paxis, oob, indirect
        self._blocks: range | None = None  # see ``blocks``
        self._form: int | None = None  # see ``form_of``
        self._parts: dict[tuple, Any] | None = None  # see ``subscript``

    def nothing(self: V) -> V:
        """The view under a condition that does not hold: instructions on it are not recorded.

        The class keeps that, so that views of this view select nothing either.
        """
        own: Any = type(self)
        made = self._with(self.offset, self.shape, self.strides, None, self.by_data)
        made.__class__ = _nothing_of(own)
        return made

    @classmethod
    def whole(cls: type[V], storage: Storage) -> V:
        """View all of a storage."""
        shape = intern(storage.shape)
        return cls(storage, 0, shape, contiguous(shape), None, storage.paxis)

    @classmethod
    def blocks_last(cls: type[V], storage: Storage) -> V:
        """View an on-chip storage as one tile (P, blocks, F), or (P, F...) without block axes."""
        if not storage.paxis:
            return cls.whole(storage)
        partitions, free = storage.shape[storage.paxis], storage.free_size
        tile = partitions * free
        shape = (partitions, storage.size // tile, free)
        return cls(storage, 0, intern(shape), intern((free, tile, 1)))

    def blocks(self) -> range:
        """Numbers of the tiles of an on-chip storage that the region reaches into."""
        if self._blocks is None:  # each check asks for it, and estimates ask some 25 times
            if not self.storage.paxis:
                self._blocks = FIRST_BLOCK
            else:
                size, first = self.storage.size // self.storage.tiles, self.offset
                last = first + _reach(self.shape, self.strides)
                self._blocks = range(first // size, last // size + 1)
        return self._blocks

    @classmethod
    def block(cls: type[V], storage: Storage, number: int) -> V:
        """One tile of an on-chip storage: its block ``number``, in row-major order."""
        shape = storage.shape[storage.paxis :]
        size = storage.size // storage.tiles
        return cls(storage, number * size, intern(shape), contiguous(shape))

    # --- properties -------------------------------------------------------------------------------
    @property
    def dtype(self) -> Any:
        """Element type as kernels see it."""
        return self.dt.of_tensor

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def on_chip(self) -> bool:
        return self.storage.on_chip

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def free_size(self) -> int:
        """Elements per partition."""
        shape = self.shape  # every check asks, mostly of tiles with one free axis
        return shape[1] if len(shape) == 2 else math.prod(shape[1:])

    @property
    def start_partition(self) -> int:
        """First partition of an on-chip view, counted inside its tensor."""
        storage = self.storage
        return self.offset // storage.free_size % storage.shape[storage.paxis]

    def __repr__(self) -> str:
        return self.brief()

    def brief(self) -> str:
        """For lists of operands: tensor, offset, sizes and type."""
        dims = "x".join(map(str, self.shape))
        name = self.storage.name or f"{self.storage.buffer}{self.storage.id}"
        return f"{name}+{self.offset}[{dims}]{self.dt}"

    def label(self) -> str:
        """For messages: name, shape, dtype and memory."""
        name = self.storage.name or f"{self.storage.buffer} tensor"
        return f"{name} {self.shape} {self.dt} in {self.storage.buffer}"

    def key(self) -> tuple:
        """Identity of the region: two views with equal keys are the same elements."""
        return (self.offset, self.shape, self.strides)

    def is_full(self) -> bool:
        """True when the view is the whole storage in its own order."""
        return not self.offset and _fills(self.shape, self.strides, self.storage.size)

    # --- other shapes of the same elements --------------------------------------------------------
    def reshape(self: V, shape: Shape) -> V:
        """View with other sizes; on chip the partition axis must not change."""
        new = tuple(shape)
        if int(np.prod(new)) != self.size:
            raise refuse(
                "sim_reshape",
                f"reshape of {self.label()} to {new} changes the number of elements, expected "
                f"{self.size}; slice it, or copy it into a tile of that shape",
            )
        if self.on_chip and self.paxis == 0 and new[0] != self.shape[0]:
            raise refuse(
                "sim_reshape",
                f"reshape of {self.label()} to {new} changes the partition axis, expected "
                f"{self.shape[0]} first; load it in that shape, from "
                f"x_hbm.reshape({new})" + ", 128 rows at a time" * (new[0] > 128),
            )
        strides = reshaped_strides(self.shape, self.strides, new)
        if strides is None:
            raise refuse(
                "sim_reshape",
                f"reshape of the strided view {self.label()} to {new} is no view; copy it first",
            )
        bounds = self._reshaped_bounds(new) if self.oob else None
        indirect = self.by_data
        if indirect is not None and indirect[0].size != 1 and new[0] != self.shape[0]:
            raise refuse(
                "sim_reshape",
                f"reshape of {self.label()}, whose rows are chosen by data, to {new}, expected "
                f"{self.shape[0]} rows first; gather the rows into a tile and reshape that",
            )
        return self._with(self.offset, intern(new), intern(strides), bounds, indirect)

    def _reshaped_bounds(self, new: Shape) -> tuple[Bound, ...] | None:
        """The conditions over the axes of ``new``: each is affine, as an address is.

        Raises:
            NkiError: an element is outside, and a joined axis hides which.
        """
        kept = []
        for coefs, const, size in self.oob or ():
            moved = reshaped_strides(self.shape, coefs, new)
            if moved is None:
                self.check_bounds()
                continue
            kept.append((moved, const, size))
        return tuple(kept) or None

    def flattened(self: V) -> V | None:
        """The tile with one free axis, or None where its strides or conditions do not allow it."""
        flat = (self.shape[0], self.free_size)
        strides = reshaped_strides(self.shape, self.strides, flat)
        if strides is None or self.oob or self.by_data:
            return None
        return type(self)(self.storage, self.offset, intern(flat), intern(strides), self.dt)

    def widened(self: V, shape: Shape) -> V:
        """Zero-stride view of ``shape``; missing trailing axes count as axes of size 1."""
        own, strides = self.shape, self.strides
        # New axes go behind a tile's, before an HBM tensor's (numpy's rule): the partition axis is
        # the first one, so (P, 1) against (P, a, b) means (P, 1, 1).
        if len(own) < len(shape):
            extra = len(shape) - len(own)
            if self.on_chip:
                own, strides = own + (1,) * extra, strides + (0,) * extra
            else:
                own, strides = (1,) * extra + own, (0,) * extra + strides
        steps = _stretched(own, strides, shape)
        if steps is None:
            raise refuse(
                "sim_broadcast",
                f"{self.label()} does not broadcast to {shape}, expected sizes equal or 1; "
                "take a part of the larger one that is as large",
            )
        bounds = None
        if self.oob:
            bounds = tuple([(self._spread(c, shape), k, n) for c, k, n in self.oob])
        return self._with(self.offset, intern(shape), steps, bounds, self.by_data)

    def _spread(self, coefs: Shape, shape: Shape) -> Shape:
        """Coefficients of a condition after ``expand``: none along new and stretched axes."""
        pad = (0,) * (len(shape) - len(coefs))
        held = tuple(c if n != 1 else 0 for c, n in zip(coefs, self.shape))
        return held + pad if self.on_chip else pad + held

    def expand_dims(self: V, axis: int) -> V:
        """View with a size-1 axis at ``axis``."""
        at = axis if axis >= 0 else axis + self.ndim + 1
        shape = (*self.shape[:at], 1, *self.shape[at:])
        strides = (*self.strides[:at], 0, *self.strides[at:])
        oob = tuple(((*c[:at], 0, *c[at:]), const, size) for c, const, size in self.oob or ())
        return self._with(self.offset, intern(shape), intern(strides), oob or None, self.by_data)

    def bitcast(self: V, dt: DType) -> V:
        """The same bits as another type of the same size."""
        dt = to_dtype(dt)
        if dt.itemsize != self.dt.itemsize:
            raise refuse(
                "sim_view_dtype",
                f"view of {self.label()} as {dt} changes the element size, expected a type of "
                f"{self.dt.itemsize} bytes; use astype to convert values",
            )
        made = self._with(self.offset, self.shape, self.strides, self.oob, self.by_data)
        made.dt = dt
        return made

    def grounded(self) -> View:
        """The same bytes in elements of a size that divides all types of this memory.

        With one element size this is the view itself, otherwise a view with a further axis: the
        parts of an element.
        """
        ground = self.storage.ground
        if ground is None:
            return self
        parts = self.dt.itemsize // ground.dtype.itemsize
        indirect = self.by_data
        if indirect is not None:
            indirect = (indirect[0], indirect[1] * parts, *indirect[2:])
        shape = intern((*self.shape, parts))
        strides = intern((*(s * parts for s in self.strides), 1))
        return View(ground, self.offset * parts, shape, strides, indirect=indirect)

    def slice_box(self: V, box: tuple[slice, ...]) -> V:
        """Sub-view by one slice of step 1 per axis, as masks cut operands."""
        # Strides stay: a box begins elsewhere and has fewer elements, nothing else changes.
        offset = self.offset
        shape = []
        conditions = []
        for s, stride in zip(box, self.strides):
            offset += s.start * stride
            shape.append(s.stop - s.start)
        # An axis that begins later moves each condition's constant along its coefficient.
        for coefs, const, size in self.oob or ():
            const += sum(c * s.start for c, s in zip(coefs, box))
            conditions.append((coefs, const, size))
        indirect = self.by_data
        if indirect is not None and indirect[0].shape[0] > 1:  # the index tile has the same rows
            tile = indirect[0]
            rows = (box[0], *(slice(0, 1) for _ in tile.shape[1:]))
            indirect = (tile.slice_box(rows), *indirect[1:])
        sizes = intern(tuple(shape))
        return self._with(offset, sizes, self.strides, tuple(conditions) or None, indirect)

    def box_of(self, part: View) -> tuple[slice, ...]:
        """The box that ``slice_box`` made ``part`` with; of a view without overlapping axes."""
        rest = part.offset - self.offset
        box = [slice(0, 1)] * self.ndim
        for axis in sorted(range(self.ndim), key=lambda a: -self.strides[a]):
            if self.shape[axis] > 1:  # digits of the distance, largest stride first
                start, rest = divmod(rest, self.strides[axis])
                box[axis] = slice(start, start + part.shape[axis])
        return tuple(box)

    def _with(
        self: V,
        offset: int,
        shape: Shape,
        strides: Shape,
        oob: tuple[Bound, ...] | None,
        indirect: Indirect | None,
    ) -> V:
        """Another region of the same storage, type and partition axis."""
        return self.__class__(
            self.storage, offset, shape, strides, self.dt, self.paxis, oob, indirect
        )

    def check_bounds(self) -> None:
        """Refuse elements outside of the storage's axes, once masks have cut the region."""
        for coefs, const, size in self.oob or ():
            # Affine, so least and greatest lie at the ends of the axes.
            low = const + sum(c * (n - 1) for c, n in zip(coefs, self.shape) if c < 0)
            high = const + sum(c * (n - 1) for c, n in zip(coefs, self.shape) if c > 0)
            if low < 0 or high >= size:
                mask = written.arguments()[1].get("mask", "")
                more = f"have mask={mask} compare all of this index, its offset, too, with {size}"
                raise refuse(
                    "err_tensor_access_out_of_bound",
                    f"index of {self.storage.label()} runs from {low} to {high}, expected 0 to "
                    f"{size - 1}; correct it, or {more if mask else 'mask the elements outside'}",
                )


def form_of(view: View) -> int:
    """A number for what rules ask of an operand: where in its memory it lies counts by partition.
    0 where data place it."""
    found = view._form
    if found is None:
        storage, row = view.storage, 0
        free = storage.free_size
        if view.offset and storage.on_chip:
            row = view.offset // (free or 1) % storage.shape[storage.paxis]
        form = (view.shape, view.strides, view.dt, view.paxis, storage.buffer, free, row)
        found = view._form = 0 if view.by_data else id(_forms.setdefault(form, form))
    return found


def called(view: View) -> str:
    """For what a message says to write: the user's name of the view, or its tensor's."""
    held = getattr(user_frame(), "f_locals", {}).items()
    own = [name for name, value in held if value is view]
    return (*own, view.storage.name or "tile")[0]


def reshaped_strides(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Strides that make ``new`` a view of (shape, strides), or None where a copy is needed.

    Both shapes hold equally many elements, so they fall into runs of axes that hold equally many;
    within a run the old axes must follow each other without gaps, and the new ones then divide it.
    """
    old = [(s, t) for s, t in zip(shape, strides) if s != 1]  # axes of size 1 have any stride
    result = [0] * len(new)
    i = j = 0
    while i < len(old) and j < len(new):
        size, want, i2, j2 = old[i][0], new[j], i + 1, j + 1
        while size != want:  # join axes on either side until both runs hold as many elements
            if want < size:
                want, j2 = want * new[j2], j2 + 1
            else:
                size, i2 = size * old[i2][0], i2 + 1
        if any(old[k][1] != old[k + 1][0] * old[k + 1][1] for k in range(i, i2 - 1)):
            return None
        step = old[i2 - 1][1]
        for k in range(j2 - 1, j - 1, -1):
            result[k] = step
            step *= new[k]
        i, j = i2, j2
    return tuple(result)


def compose(inner: View, outer: V) -> V | None:
    """``inner``, a box of a contiguous storage, re-read as the same box of ``outer``.

    ``outer`` has the storage's shape; used to move an instruction's result elsewhere.

    Raises:
        NkiError: the box reaches outside of the tensor that ``outer`` is a view of.
    """
    shape = inner.storage.shape
    if len(inner.shape) != len(shape) or len(outer.shape) != len(shape):
        return None
    if inner.is_full() and outer.oob is None:  # nearly always: no mask has cut the result
        return outer
    own = contiguous(shape)
    box, rest = [], inner.offset
    for axis in range(len(shape)):  # the offset's digits in the storage's own strides
        at, rest = divmod(rest, own[axis]) if own[axis] else (0, rest)
        if inner.shape[axis] != 1 and inner.strides[axis] != own[axis]:
            return None
        box.append(slice(at, at + inner.shape[axis]))
    moved = outer.slice_box(tuple(box))
    moved.check_bounds()
    return moved
