"""The tensor object that kernels hold: an affine view of a storage.

A view is storage + element offset + sizes + strides. On chip the first axis of a *tile* is the
partition axis; views of tensors with block dimensions have ``paxis`` block axes before it and must
be indexed down to a tile before an instruction takes them (nki.errors.rst,
err_failed_to_infer_tile_from_local_tensor).
"""

from __future__ import annotations

import linecache
from typing import Any, NoReturn

import numpy as np

from ..device.dtypes import DType, to_dtype
from ..device.errors import refuse, user_frame
from ..program import trace
from ..program.index import DynamicIndex, Index, Mask, aligned, is_integer
from ..program.program import Storage

_interned: dict[tuple[int, ...], tuple[int, ...]] = {}


def intern(values: tuple[int, ...]) -> tuple[int, ...]:
    """One shared tuple per value: programs hold few distinct shapes and many views."""
    return _interned.setdefault(values, values)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return intern(tuple(strides[::-1]))


class Tensor:
    """A view of a tensor in HBM, SBUF or PSUM (``neuronxcc.nki.tensor``).

    Attributes:
        shape: sizes, partition axis first for a tile.
        dtype: element type, equal to ``nl.bfloat16`` etc. (an np.dtype, except for tf32).
        ndim, itemsize, buffer: as the names say.
    """

    __slots__ = ("dt", "indirect", "offset", "oob", "paxis", "shape", "storage", "strides")

    def __init__(
        self,
        storage: Storage,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dt: DType | None = None,
        paxis: int = 0,
        oob: tuple[tuple[tuple[int, ...], int, int], ...] | None = None,
        indirect: tuple[Tensor, int, int, tuple[int, int]] | None = None,
    ) -> None:
        self.storage, self.offset = storage, offset
        self.shape, self.strides = shape, strides
        self.dt = storage.dtype if dt is None else dt
        self.paxis = paxis
        # out-of-bounds conditions: 0 <= const + coefs . axes < size as (coefs, const, size);
        # whether they matter is known only once a mask has cut the region
        self.oob = oob
        # data-dependent row: (index tile, element stride of one index step, length of the axis,
        # least and greatest of the affine index that is added to it)
        self.indirect = indirect

    @classmethod
    def whole(cls, storage: Storage) -> Tensor:
        shape = intern(storage.shape)
        return cls(storage, 0, shape, contiguous(shape), paxis=storage.paxis)

    # --- properties -------------------------------------------------------------------------------
    @property
    def dtype(self) -> Any:
        return self.dt.of_tensor

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dt.itemsize

    @property
    def buffer(self) -> Any:
        """The memory as kernels name it: ``nl.sbuf``, ``nl.psum``, ``nl.hbm`` or ``shared_hbm``."""
        from . import nl as language

        return getattr(language, self.storage.buffer)

    @property
    def on_chip(self) -> bool:
        return self.storage.on_chip

    @property
    def size(self) -> int:
        size = 1
        for s in self.shape:
            size *= s
        return size

    @property
    def free_size(self) -> int:
        """Elements per partition."""
        size = 1
        for s in self.shape[1:]:
            size *= s
        return size

    @property
    def partition_stride(self) -> int:
        """Elements between partitions of the storage (on chip)."""
        return self.storage.free_size

    @property
    def start_partition(self) -> int:
        """First partition of an on-chip view, counted inside its tensor."""
        storage = self.storage
        return self.offset // storage.free_size % storage.shape[storage.paxis]

    def __repr__(self) -> str:
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
        return self.offset == 0 and self.size == self.storage.size and self._is_contiguous()

    def _is_contiguous(self) -> bool:
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):
            if size != 1:
                if stride != step:
                    return False
                step *= size
        return True

    # --- subscripts -------------------------------------------------------------------------------
    def __getitem__(self, key: Any) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        if isinstance(keys[-1], Mask):  # operand mask: t[i_f < n], or t[i_p, i_f, i_f < n]
            view = self[keys[:-1]] if len(keys) > 1 else self
            return view._masked(keys[-1])
        kinds = {_kind(k) for k in keys}
        if "advanced" in kinds:
            if "basic" in kinds:
                raise refuse(
                    "err_unsupported_mixing_basic_advanced_tensor_indexing",
                    f"subscript of {self.label()} mixes slices with arange/mgrid objects, expected "
                    "one kind; write slices as nl.arange axes or all axes as slices",
                )
            return self._advanced(keys)
        return self._basic(_expand_ellipsis(keys, self.ndim, self))

    def _masked(self, mask: Mask) -> Tensor:
        """The box that an operand mask leaves."""
        cut = trace.region(mask, self.shape)
        if cut is None:
            return self
        if not isinstance(cut, tuple):
            raise refuse(
                "sim_operand_mask",
                f"operand mask of {self.label()} is no box of at least one element, expected one "
                "bound per axis; slice the operand",
            )
        return self.slice_box(cut)

    def _basic(self, keys: list[Any]) -> Tensor:
        offset = self.offset
        shape: list[int] = []
        strides: list[int] = []
        oob: list[tuple[int, int, int, int]] = []
        moved: list[tuple[int, int, int] | None] = []
        paxis = self.paxis
        for axis, k in enumerate(keys):
            size, stride = self.shape[axis], self.strides[axis]
            start, count, step, keep = _slice_of(k, size, axis == self.paxis and self.on_chip)
            offset += start * stride
            moved.append((start, step, len(shape)) if keep else (start, 0, -1))
            if start < 0 or start + (count - 1) * step >= size:
                oob.append((len(shape) if keep else -1, start, step, size))
            if keep:
                shape.append(count)
                strides.append(stride * step)
            elif axis < self.paxis:
                paxis -= 1
        if self.on_chip:
            while len(shape) < 2:
                shape.append(1)
                strides.append(1)
        conditions = self._oob_conditions(oob, moved, len(shape)) if oob or self.oob else None
        if conditions:
            self._refuse_certain(conditions, tuple(shape))
        return Tensor(
            self.storage, offset, intern(tuple(shape)), intern(tuple(strides)), self.dt, paxis,
            conditions or None, self.indirect,
        )  # fmt: skip

    def _oob_conditions(self, oob, moved, ndim):
        """Bounds that the new view's axes still have to respect, old ones rewritten to them."""
        conditions = []
        for axis, start, step, size in oob:
            coefs = tuple(step if a == axis else 0 for a in range(ndim))
            conditions.append((coefs, start, size))
        for before, const, size in self.oob or ():
            new_coefs = [0] * ndim
            for old, coef in enumerate(before):
                start, step, new = moved[old]
                const += coef * start
                if new >= 0:
                    new_coefs[new] += coef * step
            conditions.append((tuple(new_coefs), const, size))
        return tuple(conditions)

    def _refuse_certain(self, conditions: Any, shape: tuple[int, ...]) -> None:
        """Refuse when even the first element is outside: no mask over the view can mend that."""
        for _, const, size in conditions:
            if not 0 <= const < size:
                raise refuse(
                    "err_tensor_access_out_of_bound",
                    f"subscript of {self.label()} starts at {const}, expected 0 to {size - 1}; "
                    "correct the index",
                )

    def _advanced(self, keys: tuple[Any, ...]) -> Tensor:
        if any(k is Ellipsis for k in keys) or len(keys) > self.ndim:
            keys = tuple(_expand_ellipsis(keys, self.ndim, self))
        grids, shape = aligned(
            [g for g in map(_grid_of, keys) if g is not None],
            [k.shape for k in keys if isinstance(k, Tensor)],
        )
        keys = _with_grids(keys, grids)
        if not self.on_chip and any(g.dense for g in grids):
            for axis, k in enumerate(keys):
                rows = k.tensor if isinstance(k, DynamicIndex) else k
                if isinstance(rows, Tensor) and rows.size != 1:
                    raise self._index_tile_refusal(axis, rows)
        if len(keys) < self.ndim:
            keys = keys + tuple(slice(None) for _ in range(self.ndim - len(keys)))
        rest = [(a, k) for a, k in enumerate(keys) if isinstance(k, slice)]
        ndim = len(shape)
        if ndim < 2 and self.on_chip:
            raise refuse(
                "err_1d_arange_not_supported",
                f"{self.label()} is indexed with a 1-D arange, expected at least two axes; write "
                "nl.arange(n)[:, None] or [None, :]",
            )
        total, coefs = self.offset, [0] * ndim
        oob: list[tuple[tuple[int, ...], int, int]] = []
        indirect = self.indirect
        for axis, k in enumerate(keys):
            if isinstance(k, slice):
                continue
            expr, indirect = self._axis_expr(k, axis, shape, indirect)
            total += expr.const * self.strides[axis]
            for a, c in enumerate(expr.coefs):
                coefs[a] += c * self.strides[axis]
            low, high = expr.bounds()
            chosen_by_data = isinstance(k, (Tensor, DynamicIndex))  # checked when it runs
            if not chosen_by_data and (low < 0 or high >= self.shape[axis]):
                oob.append((expr.coefs, expr.const, self.shape[axis]))
        shape += tuple(self.shape[a] for a, _ in rest)
        strides = (*coefs, *(self.strides[a] for a, _ in rest))
        pad = len(rest)
        conditions = tuple((c + (0,) * pad, k, s) for c, k, s in oob) or None
        return Tensor(
            self.storage, total, intern(shape), intern(strides), self.dt, 0, conditions, indirect
        )

    def _axis_expr(self, k: Any, axis: int, shape: tuple[int, ...], indirect: Any) -> Any:
        """Affine part of one advanced subscript, and the data-dependent part if it has one."""
        ndim = len(shape)
        if is_integer(k):
            return Index(int(k), (0,) * ndim, shape), indirect
        if isinstance(k, Index):
            return k.broadcast(shape), indirect
        tensor, extra = (k.tensor, k.index) if isinstance(k, DynamicIndex) else (k, 0)
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"subscript {k!r} of axis {axis} is not an index, expected an integer, slice, "
                "arange, mgrid or an index tile"
            )
        if indirect is not None:
            raise refuse(
                "err_indirect_indices_free_dim",
                f"{self.label()} is indexed by data on two axes, expected one; load one axis "
                "indirectly and select the other with an affine index",
            )
        self._check_index_tile(tensor, axis)
        expr = (
            extra.broadcast(shape) if isinstance(extra, Index) else Index(extra, (0,) * ndim, shape)
        )
        return expr, (tensor, self.strides[axis], self.shape[axis], expr.bounds())

    def _check_index_tile(self, index: Tensor, axis: int) -> None:
        """An index tile chooses one row of HBM for each partition."""
        if self.on_chip:
            if index.size != 1:
                raise refuse(
                    "err_indirect_indices_free_dim",
                    f"axis {axis} of {self.label()} is indexed by {index.label()}, expected a "
                    "single run-time offset on chip; gather rows while loading from HBM",
                )
            return
        if index.free_size != 1 or (axis == self.ndim - 1 and axis > 0):
            raise self._index_tile_refusal(axis, index)

    def _index_tile_refusal(self, axis: int, index: Tensor) -> Exception:
        return refuse(
            "err_indirect_indices_free_dim",
            f"axis {axis} of {self.label()} is indexed by {index.label()}, expected a (P, 1) "
            "index tile on the partition or a block axis; index rows by data and columns with "
            "nl.arange (nl.mgrid does not serve here)",
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        view = self if key is Ellipsis else self[key]
        trace.current("assignment").assign(view, value)

    # --- views ------------------------------------------------------------------------------------
    def reshape(self, *sizes: Any, shape: Any = None) -> Tensor:
        """View with other sizes; on chip the partition axis must stay as it is."""
        new = _sizes(sizes, shape)
        if -1 in new:
            known = -int(np.prod(new))
            new = tuple(self.size // known if s == -1 else s for s in new)
        if int(np.prod(new)) != self.size:
            raise refuse(
                "sim_reshape",
                f"reshape of {self.label()} to {new} changes the number of elements, expected "
                f"{self.size}",
            )
        if self.on_chip and self.paxis == 0 and new[0] != self.shape[0]:
            raise refuse(
                "sim_reshape",
                f"reshape of {self.label()} to {new} changes the partition axis, expected "
                f"{self.shape[0]} first; move data across partitions with nc_transpose or DMA",
            )
        strides = reshaped_strides(self.shape, self.strides, new)
        if strides is None:
            raise refuse(
                "sim_reshape",
                f"reshape of the strided view {self.label()} to {new} is no view; copy it first",
            )
        return Tensor(self.storage, self.offset, intern(new), intern(strides), self.dt, self.paxis)

    def broadcast_to(self, *sizes: Any, shape: Any = None) -> Tensor:
        """numpy broadcasting; from one partition to many it is a ones-matmul on the device."""
        new = _sizes(sizes, shape)
        own = self
        if own.ndim > len(new) >= 2 and all(s == 1 for s in own.shape[len(new) :]):
            own = own.reshape(own.shape[: len(new)])  # axes of an mgrid that are named, of size 1
        if own.on_chip and own.shape[0] == 1 and len(new) == own.ndim and new[0] > 1:
            from . import nl as language

            return language.partition_broadcast(own, new)
        return own.expand(new)

    def expand(self, shape: tuple[int, ...]) -> Tensor:
        """Zero-stride view of ``shape``; missing trailing axes count as axes of size 1."""
        own, strides = self.shape, self.strides
        if len(own) < len(shape):
            extra = len(shape) - len(own)
            if self.on_chip:  # the partition axis stays first: (P, 1) against (P, a, b)
                own, strides = own + (1,) * extra, strides + (0,) * extra
            else:
                own, strides = (1,) * extra + own, (0,) * extra + strides
        if len(own) != len(shape) or any(o not in (1, s) for o, s in zip(own, shape)):
            raise refuse(
                "sim_broadcast",
                f"{self.label()} does not broadcast to {shape}; every axis must be equal or 1",
            )
        steps = tuple(0 if o == 1 and s != 1 else t for o, s, t in zip(own, shape, strides))
        return Tensor(
            self.storage, self.offset, intern(shape), intern(steps), self.dt, self.paxis,
            self.oob, self.indirect,
        )  # fmt: skip

    def expand_dims(self, axis: int) -> Tensor:
        """View with a size-1 axis at ``axis``."""
        at = axis if axis >= 0 else axis + self.ndim + 1
        shape = (*self.shape[:at], 1, *self.shape[at:])
        strides = (*self.strides[:at], 0, *self.strides[at:])
        oob = tuple(((*c[:at], 0, *c[at:]), const, size) for c, const, size in self.oob or ())
        return Tensor(
            self.storage, self.offset, intern(shape), intern(strides), self.dt, self.paxis,
            oob or None, self.indirect,
        )  # fmt: skip

    def view(self, dtype: Any) -> Tensor:
        """The same bits as another type of the same size."""
        dt = to_dtype(dtype)
        if dt.itemsize != self.dt.itemsize:
            raise refuse(
                "sim_view_dtype",
                f"view of {self.label()} as {dt} changes the element size, expected a type of "
                f"{self.dt.itemsize} bytes; use astype to convert values",
            )
        return Tensor(self.storage, self.offset, self.shape, self.strides, dt, self.paxis)

    def assert_shape(self, shape: Any) -> Tensor:
        """Check the shape and return the tensor."""
        if tuple(shape) != tuple(self.shape):
            raise refuse(
                "err_annotation_shape_mismatch",
                f"{self.label()} has shape {self.shape}, expected {tuple(shape)}",
            )
        return self

    def astype(self, dtype: Any) -> Tensor:
        """A copy with another element type."""
        from . import nl as language

        return language.copy(self, dtype=dtype)

    def slice_box(self, box: tuple[slice, ...]) -> Tensor:
        """Sub-view by one slice per axis (internal: masks cut operands with it)."""
        offset = self.offset
        shape = []
        conditions = []
        for s, stride in zip(box, self.strides):
            offset += s.start * stride
            shape.append(s.stop - s.start)
        for coefs, const, size in self.oob or ():
            const += sum(c * s.start for c, s in zip(coefs, box))
            conditions.append((coefs, const, size))
        indirect = self.indirect
        if indirect is not None and indirect[0].shape[0] > 1:  # the index tile has the same rows
            tile = indirect[0]
            rows = (box[0], *(slice(0, 1) for _ in tile.shape[1:]))
            indirect = (tile.slice_box(rows), *indirect[1:])
        return Tensor(
            self.storage, offset, intern(tuple(shape)), self.strides, self.dt, self.paxis,
            tuple(conditions) or None, indirect,
        )  # fmt: skip

    def check_bounds(self) -> None:
        """Refuse elements outside of the storage's axes, once masks have cut the region."""
        for coefs, const, size in self.oob or ():
            low = const + sum(c * (n - 1) for c, n in zip(coefs, self.shape) if c < 0)
            high = const + sum(c * (n - 1) for c, n in zip(coefs, self.shape) if c > 0)
            if low < 0 or high >= size:
                raise refuse(
                    "err_tensor_access_out_of_bound",
                    f"index of {self.storage.label()} runs from {low} to {high}, expected 0 to "
                    f"{size - 1}; correct the index or mask the elements outside",
                )

    # --- data and truth ---------------------------------------------------------------------------
    def numpy(self) -> np.ndarray:
        """Current values (eager mode only)."""
        return trace.current("Tensor.numpy").eager_values(self)

    def __str__(self) -> str:
        tracer = trace.active()
        if tracer is not None and tracer.machine is not None:
            return f"{self.label()}\n{self.numpy()}"
        return self.label()

    def __bool__(self) -> NoReturn:
        raise refuse(*_truth_refusal(self))

    def __iter__(self) -> NoReturn:
        raise refuse(
            "sim_tensor_iteration",
            f"{self.label()} cannot be iterated over; loop over nl.affine_range and index it",
        )

    def __int__(self) -> NoReturn:
        self.__bool__()

    __float__ = __int__
    __index__ = __int__
    __hash__ = object.__hash__


def _truth_refusal(tensor: Tensor) -> tuple[str, str]:
    """Identifier and message for a truth test, by the statement that asks."""
    frame = user_frame(3)
    line = "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    word = line.split(maxsplit=1)[0] if line.strip() else ""
    if word == "while":
        return (
            "err_while_loop_requires_unconditional_entry",
            f"while loop on {tensor.label()}, expected a condition known while tracing; loop over "
            "nl.sequential_range with a fixed trip count and mask what is done already",
        )
    if word in ("if", "elif"):
        return (
            "err_dynamic_control_flow_not_supported",
            f"{tensor.label()} is used as the condition of an if, expected a Python value known "
            "while tracing; select values with nl.where or a mask",
        )
    return (
        "err_ambiguous_tensor_truth_value",
        f"{tensor.label()} is used as a truth value (and, or, not, bool), which has no meaning for "
        "a tensor, expected a Python value; join with & and |, negate with ~, test 'is None'",
    )


def _sizes(given: tuple[Any, ...], shape: Any) -> tuple[int, ...]:
    """Sizes given one by one, as one sequence, or by keyword."""
    if shape is None:
        shape = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return tuple(int(s) for s in shape)


def _kind(k: Any) -> str:
    if isinstance(k, (Index, DynamicIndex, Tensor, Mask)):
        return "advanced"
    return "basic" if isinstance(k, slice) and k != slice(None) else "either"


def _expand_ellipsis(keys: tuple[Any, ...], ndim: int, tensor: Tensor) -> list[Any]:
    count = sum(k is Ellipsis for k in keys)
    if count > 1 or len(keys) - count > ndim:
        raise refuse(
            "sim_index_rank",
            f"subscript of {tensor.label()} has {len(keys) - count} indices, expected at most "
            f"{ndim}",
        )
    fill = [slice(None)] * (ndim - len(keys) + count)
    if count:
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        return [*keys[:at], *fill, *keys[at + 1 :]]
    return [*keys, *fill]


def _grid_of(k: Any) -> Index | None:
    """The index grid of one advanced subscript, if it has one."""
    index = k.index if isinstance(k, DynamicIndex) else k
    return index if isinstance(index, Index) else None


def _with_grids(keys: tuple[Any, ...], grids: list[Index]) -> tuple[Any, ...]:
    """``keys`` with their index grids replaced, in order."""
    rest = iter(grids)
    new = []
    for k in keys:
        if isinstance(k, Index):
            k = next(rest)
        elif _grid_of(k) is not None:
            k = DynamicIndex(k.tensor, next(rest))
        new.append(k)
    return tuple(new)


def _slice_of(k: Any, size: int, keep_axis: bool) -> tuple[int, int, int, bool]:
    """(start, count, step, keep) of a basic subscript on an axis of ``size``."""
    if isinstance(k, slice):
        for bound in (k.start, k.stop, k.step):
            if bound is not None and not is_integer(bound):
                raise refuse(
                    "sim_index_type",
                    f"slice bound of type {type(bound).__name__}, expected an integer known while "
                    "tracing; divide sizes with //",
                )
        step = 1 if k.step is None else int(k.step)
        start = 0 if k.start is None else int(k.start)
        stop = size if k.stop is None else int(k.stop)
        if k.stop is not None and k.stop < 0:
            stop += size
        if k.start is not None and k.start < 0 and k.stop is None:
            start += size
        count = -(-(stop - start) // step)
        if count <= 0 or step < 1:
            raise refuse(
                "sim_empty_slice",
                f"slice {k.start}:{k.stop}:{k.step} of an axis of length {size} is empty, expected "
                "start < stop and a positive step",
            )
        return start, count, step, True
    if is_integer(k):
        at = int(k) + size if -size <= k < 0 else int(k)
        return at, 1, 1, keep_axis
    raise refuse(
        "sim_index_type",
        f"subscript of type {type(k).__name__}, expected int, slice, nl.ds, nl.arange, nl.mgrid "
        "or an index tile",
    )


def reshaped_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Strides that make ``new`` a view of (shape, strides), or None where a copy is needed."""
    old = [(s, t) for s, t in zip(shape, strides) if s != 1]
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


def compose(inner: Tensor, outer: Tensor) -> Tensor | None:
    """``inner``, a box of a contiguous storage, re-read as the same box of ``outer``.

    ``outer`` has the storage's shape; used to move an instruction's result elsewhere.

    Raises:
        NkiError: the box reaches outside of the tensor that ``outer`` is a view of.
    """
    shape = inner.storage.shape
    if len(inner.shape) != len(shape) or len(outer.shape) != len(shape):
        return None
    if inner.is_full() and outer.oob is None:
        return outer
    own = contiguous(shape)
    box, rest = [], inner.offset
    for axis in range(len(shape)):
        at, rest = divmod(rest, own[axis]) if own[axis] else (0, rest)
        if inner.shape[axis] != 1 and inner.strides[axis] != own[axis]:
            return None
        box.append(slice(at, at + inner.shape[axis]))
    moved = outer.slice_box(tuple(box))
    moved.check_bounds()
    return moved


def _operator(name: str, reflected: bool = False):
    def apply(self: Tensor, other: Any) -> Any:
        from . import nl as language

        if isinstance(other, Index) and name == "add":
            return DynamicIndex(self, other)
        if isinstance(other, Tensor) and other.shape[0] != self.shape[0]:
            raise refuse(
                "err_num_partition_mismatch",
                f"operator '{name}' of {self.label()} and {other.label()}, expected equal "
                "partition counts: operators do not broadcast the partition axis; use nl "
                "functions or broadcast_to",
            )
        function = getattr(language, name)
        return function(other, self) if reflected else function(self, other)

    return apply


for _name, _symbol in {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv", "power": "pow",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
    "left_shift": "lshift", "right_shift": "rshift",
}.items():  # fmt: skip
    setattr(Tensor, f"__{_symbol}__", _operator(_name))
    setattr(Tensor, f"__r{_symbol}__", _operator(_name, reflected=True))
for _name, _symbol in {
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
    "equal": "eq", "not_equal": "ne",
}.items():  # fmt: skip
    setattr(Tensor, f"__{_symbol}__", _operator(_name))


def _inplace(name: str):
    def apply(self: Tensor, other: Any) -> Tensor:
        return trace.current("in-place operator").in_place(self, name, other)

    return apply


for _name, _symbol in {"add": "iadd", "subtract": "isub", "multiply": "imul",
                       "divide": "itruediv"}.items():  # fmt: skip
    setattr(Tensor, f"__{_symbol}__", _inplace(_name))


def _negative(self: Tensor) -> Tensor:
    from . import nl as language

    return language.negative(self)


def _invert(self: Tensor) -> Tensor:
    from . import nl as language

    return language.invert(self)


setattr(Tensor, "__neg__", _negative)  # noqa: B010 - as the loops above
setattr(Tensor, "__invert__", _invert)  # noqa: B010
