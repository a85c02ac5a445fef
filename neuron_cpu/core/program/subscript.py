"""The elements of a view that a subscript selects, by slices, integers, index grids and masks.

One subscript does not mix the two families, as in the language itself (aws-neuron-sdk v2.21.1,
general/nki/programming_model.rst, tensor indexing): *basic* subscripts give every axis a slice or
an integer and keep the order of the axes; *advanced* ones give axes an affine expression over a
common index grid, whose axes are those of the result.
"""

from collections.abc import Callable, Sequence
from operator import contains, mul
from types import EllipsisType, NoneType
from typing import Any

import numpy as np

from ..device.dtypes import Shape
from ..device.errors import NkiError, refuse
from . import regions
from .index import DynamicIndex, Index, Mask, affine, aligned, is_integer
from .view import Bound, Indirect, V, View, called, form_of, intern

ADVANCED = (Index, DynamicIndex, View, Mask)
Moved = tuple[int, tuple[tuple[int, int], ...]]  # an old axis: start, (new axis, step) of each


def subscript(view: V, key: Any) -> V:
    """``view[key]``.

    Raises:
        NkiError: subscripts of both families, of the wrong type or number, or certainly outside.
    """
    keys = key if isinstance(key, tuple) else (key,)
    try:
        told = tuple([k if type(k) is int else k.pair for k in keys])
    except AttributeError:  # slices, masks, tiles, None
        return _selected(view, keys, key)
    parts = view._parts
    if parts is None:
        parts = view._parts = {}
    found = parts.get(told)
    if found is None:
        known = Index in map(type, keys) and view.oob is view.by_data is None
        found = parts[told] = _repeated(view, keys) if known else _selected(view, keys, key)
    return found


def _selected(view: V, keys: tuple[Any, ...], key: Any) -> V:
    """``view[key]`` of any kind; ``keys`` is the key as a tuple."""
    if NoneType in map(type, keys) and keys is key:
        return with_new_axes(view, keys, View.expand_dims)
    # An operand mask stands alone or behind the indices: t[i_f < n], or t[i_p, i_f, i_f < n].
    if isinstance(keys[-1], Mask):
        selected = subscript(view, keys[:-1]) if len(keys) > 1 else view
        return _masked(selected, keys[-1])
    if isinstance(keys[-1], (bool, np.bool_)):  # a condition on loop variables only: known by now
        selected = subscript(view, keys[:-1]) if len(keys) > 1 else view
        return selected if keys[-1] else selected.nothing()
    for k in keys:
        if isinstance(k, ADVANCED):
            return _resolved(view, keys)
    return _basic(view, one_for_each_axis(keys, view))


def one_for_each_axis(keys: Sequence[Any], view: View) -> Sequence[Any]:
    """One subscript for each axis: an ellipsis, or a missing subscript at the end, means ':'."""
    ndim = view.ndim
    if len(keys) == ndim and EllipsisType not in map(type, keys):
        return keys
    count = sum(k is Ellipsis for k in keys)
    if count > 1 or len(keys) - count > ndim:
        raise refuse(
            "sim_index_rank",
            f"subscript of {view.label()} has {len(keys) - count} indices, expected at most "
            f"{ndim}; write a range as start:stop, and add an axis with .reshape",
        )
    fill = [slice(None)] * (ndim - len(keys) + count)
    if count:
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        return [*keys[:at], *fill, *keys[at + 1 :]]
    return [*keys, *fill]


def _masked(view: V, mask: Mask) -> V:
    """The box that an operand mask leaves."""
    cut = regions.region(mask, view.shape)
    if cut is None:
        return view
    if not isinstance(cut, tuple):
        raise refuse(
            "sim_operand_mask",
            f"operand mask of {view.label()} is no box of at least one element, expected one "
            "bound per axis; slice the operand, or choose elements with nisa.affine_select",
        )
    return view.slice_box(cut)


# --- slices and integers --------------------------------------------------------------------------
def _basic(view: V, keys: Sequence[Any]) -> V:
    offset, paxis = view.offset, view.paxis
    shape: list[int] = []
    strides: list[int] = []
    outside: list[tuple[int, int, int, int]] = []  # (new axis or -1, start, step, size)
    moved: list[Moved] = []
    for axis, k in enumerate(keys):
        size, stride = view.shape[axis], view.strides[axis]
        # A tile never loses its partition axis: an integer there leaves one of size 1.
        start, count, step, keep = _slice_of(k, size, axis == view.paxis and view.on_chip)
        offset += start * stride
        moved.append((start, ((len(shape), step),) if keep else ()))
        # Not refused here: a mask over the view may leave those elements out.
        if start < 0 or start + (count - 1) * step >= size:
            outside.append((len(shape) if keep else -1, start, step, size))
        if keep:
            shape.append(count)
            strides.append(stride * step)
        elif axis < view.paxis:
            paxis -= 1
    if view.on_chip:  # tiles have at least two axes: m[:, 0] is a (P, 1) tile
        while len(shape) < 2:
            shape.append(1)
            strides.append(1)
    bounds = []
    if outside or view.oob:
        for axis, start, step, size in outside:
            bounds.append((tuple(step if a == axis else 0 for a in range(len(shape))), start, size))
        bounds += _substituted(view.oob or (), moved, len(shape))
        _refuse_certain(view, bounds)
    sizes, steps = intern(tuple(shape)), intern(tuple(strides))
    oob, indirect = tuple(bounds) or None, view.by_data
    if indirect is not None and indirect[0].size > 1:  # the rows kept are those of the index tile
        tile = indirect[0]
        indirect = (_basic(tile, [keys[0], *(slice(None),) * (tile.ndim - 1)]), *indirect[1:])
    return type(view)(view.storage, offset, sizes, steps, view.dt, paxis, oob, indirect)


def with_new_axes(view: V, key: tuple[Any, ...], expand: Callable[[V, int], V]) -> V:
    """A subscript with None: axes of size 1, which ``expand`` makes.

    ``mask[:, k][:, None]`` ran on devices, where a column that an integer has left keeps its axis:
    the None names that one.
    """
    kept = tuple(k for k in key if k is not None)
    found = view[kept] if kept else view  # type: ignore[index]
    if key[-1] is None and len(kept) == len(key) - 1 and found.ndim == len(kept) + 1:
        return found
    at = 0
    for number, k in enumerate(key):
        if k is None:
            found = expand(found, at)
        elif k is Ellipsis:
            at += view.ndim - len(kept)
        at += k is None or not is_integer(k) or (view.on_chip and number == 0)
    return found


def _slice_of(k: Any, size: int, keep_axis: bool) -> tuple[int, int, int, bool]:
    """(start, count, step, keep) of a basic subscript on an axis of ``size``.

    Unlike numpy's, a slice is not cut to the axis: elements outside are an error or masked.
    """
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
        # A negative start counts from the end only without a stop: nl.ds(-1, 2) is slice(-1, 1),
        # a range that begins before the axis, and must not become one that wraps around.
        if k.stop is not None and k.stop < 0:
            stop += size
        if k.start is not None and k.start < 0 and k.stop is None:
            start += size
        count = -(-(stop - start) // step)
        if count <= 0 or step < 1:
            mend = "backwards it is 63 - nl.arange(64)[None, :]"
            if stop == start:
                mend = "the part of iteration k is k * width : (k + 1) * width"
            raise refuse(
                "sim_empty_slice",
                f"slice {k.start}:{k.stop}:{k.step} of an axis of length {size} is empty, expected "
                f"start < stop and a positive step; {mend}",
            )
        return start, count, step, True
    if is_integer(k):
        at = int(k) + size if -size <= k < 0 else int(k)
        return at, 1, 1, keep_axis
    raise refuse(
        "sim_index_type",
        f"subscript of type {type(k).__name__}, expected int, slice, nl.ds, nl.arange, nl.mgrid "
        "or an index tile; for None use nl.expand_dims(x, axis), for a list or an array one "
        "slice at a time",
    )


def _substituted(bounds: tuple[Bound, ...], moved: list[Moved], ndim: int) -> list[Bound]:
    """Bounds over the old axes, rewritten to the ``ndim`` new ones.

    Each old axis is ``start + sum of step * new axis`` now, so its coefficient goes to the new axes
    times the steps, and times the start into the constant.
    """
    rewritten = []
    for before, const, size in bounds:
        coefs = [0] * ndim
        for coef, (start, terms) in zip(before, moved):
            const += coef * start
            for axis, step in terms:
                coefs[axis] += coef * step
        rewritten.append((tuple(coefs), const, size))
    return rewritten


def _refuse_certain(view: View, bounds: list[Bound]) -> None:
    """Refuse when even the first element is outside: no mask over the view can mend that."""
    for _, const, size in bounds:
        if not 0 <= const < size:
            raise refuse(
                "err_tensor_access_out_of_bound",
                f"subscript of {view.label()} starts at {const}, expected 0 to {size - 1}; "
                "correct the index",
            )


# --- index grids ----------------------------------------------------------------------------------
# By the view's form and the subscript's without its constants: the region's shape and strides, and
# the constants with which it lies inside on each axis. Kernels repeat few.
_layouts: dict[tuple, tuple[Shape, Shape, list[range]]] = {}


def _repeated(view: V, keys: tuple[Any, ...]) -> V:
    """``view[keys]`` of numbers and index grids, from the cached result of this form."""
    starts = [k if type(k) is int else k.const for k in keys]
    form = (form_of(view), *[None if type(k) is int else k.form for k in keys])
    found = _layouts.get(form)
    if found is None:
        made = _resolved(view, keys)
        if len(keys) == view.ndim and not made.oob:
            ends = [k.bounds() if isinstance(k, Index) else (k, k) for k in keys]
            inside = [
                range(at - low, size - high + at)
                for (low, high), at, size in zip(ends, starts, view.shape)
            ]
            _layouts[form] = made.shape, made.strides, inside
        return made
    shape, strides, inside = found
    if not all(map(contains, inside, starts)):
        return _resolved(view, keys)
    offset = view.offset + sum(map(mul, starts, view.strides))
    return view.__class__(view.storage, offset, shape, strides, view.dt)


def _resolved(view: V, keys: tuple[Any, ...]) -> V:
    keys, grid = _on_one_grid(view, keys)
    # Address of a grid point: the sum over the axes of expression times stride, affine again.
    # Axes without a subscript of their own follow the grid's, whole.
    offset, shape, strides = view.offset, grid, [0] * len(grid)
    outside: list[Bound] = []
    moved: list[Moved] = []
    indirect = view.by_data
    ndim = len(shape) + sum(isinstance(k, slice) for k in keys)
    for axis, k in enumerate(keys):
        size, stride = view.shape[axis], view.strides[axis]
        if isinstance(k, slice):
            moved.append((0, ((len(shape), 1),)))
            shape += (size,)
            strides.append(stride)
            continue
        first = all(map(is_integer, keys[:axis]))  # of the axes that are left: the partition axis
        expr, indirect = _axis_expr(view, k, axis, grid, indirect, first)
        offset += expr.const * stride
        for a, c in enumerate(expr.coefs):
            strides[a] += c * stride
        moved.append((expr.const, tuple(enumerate(expr.coefs))))
        low, high = expr.bounds()
        chosen_by_data = isinstance(k, (View, DynamicIndex))  # checked when it runs
        if not chosen_by_data and (low < 0 or high >= size):
            outside.append((expr.coefs + (0,) * (ndim - len(grid)), expr.const, size))
    if view.oob:
        if indirect is not None:  # no condition can be rewritten to rows that data choose
            view.check_bounds()
        else:
            outside += _substituted(view.oob, moved, ndim)
    sizes, steps = intern(shape), intern(tuple(strides))
    return type(view)(
        view.storage, offset, sizes, steps, view.dt, 0, tuple(outside) or None, indirect
    )


def _on_one_grid(view: View, keys: tuple[Any, ...]) -> tuple[tuple[Any, ...], Shape]:
    """One subscript for each axis, all index grids on a common one, and that grid's shape.

    Raises:
        NkiError: a slice among the grids, grids that do not broadcast, a one-axis grid on chip, or
            index tiles in a subscript that does not take them.
    """
    keys = _of_one_kind(view, tuple(one_for_each_axis(keys, view)))
    if view.by_data is not None and view.by_data[0].size > 1:
        raise refuse(
            "err_indirect_indices_free_dim",
            f"{view.label()}, whose rows are chosen by data, is indexed with arange/mgrid objects, "
            "expected all indices in one subscript; write tensor[rows, columns]",
        )
    found = [g for g in map(_grid_of, keys) if g is not None]
    # One element of an index tile, alone, is an integer that is known when the kernel runs.
    tiles = [k for k in keys if isinstance(k, View) and (found or view.on_chip or k.size > 1)]
    for k in (one for one in tiles if not one.on_chip):  # nl.load's documentation, SDK 2.21
        raise refuse(
            "sim_index_tile",
            f"{view.label()} is indexed with {k.label()}, expected indices in SBUF; load them "
            f"first, index = nl.load({called(k)}), and write index in its place",
        )
    grids, grid = aligned(found, [k.shape for k in tiles])
    keys = _with_grids(keys, grids)
    if not view.on_chip and any(g.dense for g in grids):
        for axis, k in enumerate(keys):
            rows = k.tensor if isinstance(k, DynamicIndex) else k
            if isinstance(rows, View) and rows.size != 1:
                raise _index_tile_refusal(view, axis, rows)
    if len(grid) < 2 and view.on_chip:
        raise refuse(
            "err_1d_arange_not_supported",
            f"{view.label()} is indexed with a 1-D arange, expected at least two axes; write "
            "nl.arange(n)[:, None] or [None, :]",
        )
    return keys, grid


def _of_one_kind(view: View, keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse slices among index grids, except whole axes behind all grids.

    numpy puts the grid's axes in front or where the indices stand, by rules that sources of the
    language do not mention; behind the grids both readings agree. Numbers that tiles hold have no
    grid: slices of HBM beside them give an axis each, as NxD Inference 0.4 writes them
    (modules/chunked_prefill/flash_pa_with_schedule.py).
    """
    advanced = [axis for axis, k in enumerate(keys) if isinstance(k, ADVANCED)]
    slices = {axis: k for axis, k in enumerate(keys) if isinstance(k, slice)}
    if all(k == slice(None) and axis > advanced[-1] for axis, k in slices.items()):
        return keys
    if view.on_chip or any(getattr(keys[axis], "size", 0) != 1 for axis in advanced):
        raise refuse(
            "err_unsupported_mixing_basic_advanced_tensor_indexing",
            f"subscript of {view.label()} mixes slices with arange/mgrid objects, expected "
            "one kind, or whole axes behind them; write all axes as slices, or all as "
            f"nl.arange({min(128, view.shape[0])})[:, None] and "
            f"nl.arange({view.shape[-1]})[None, :], or : for the whole last one",
        )
    parts = {axis: _slice_of(k, view.shape[axis], True) for axis, k in slices.items()}
    grid = tuple(count for _, count, _, _ in parts.values())
    made = [*keys]
    for at, (axis, (start, _, step, _)) in enumerate(parts.items()):
        made[axis] = affine(start, tuple(step * (a == at) for a in range(len(grid))), grid)
    return tuple(made)


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


def _axis_expr(
    view: View, k: Any, axis: int, shape: Shape, indirect: Indirect | None, first: bool
) -> tuple[Index, Indirect | None]:
    """Affine part of one advanced subscript, and the data-dependent part if it has one.

    Args:
        first: integers have selected on all axes before this one.
    """
    flat = (0,) * len(shape)
    if is_integer(k):
        return affine(int(k), flat, shape), indirect
    if isinstance(k, Index):
        return k.broadcast(shape), indirect
    tile, extra = (k.tensor, k.index) if isinstance(k, DynamicIndex) else (k, 0)
    if not isinstance(tile, View):
        raise refuse(
            "sim_index_type",
            f"subscript {k!r} of axis {axis} of {view.label()} is no index, expected an integer, "
            "nl.arange, nl.mgrid or an index tile; write a range as start:stop",
        )
    if indirect is not None:
        raise refuse(
            "err_indirect_indices_free_dim",
            f"{view.label()} is indexed by data on two axes, expected one; load one axis "
            "indirectly and select the other with an affine index",
        )
    _check_index_tile(view, tile, axis, first)
    expr = extra.broadcast(shape) if isinstance(extra, Index) else affine(extra, flat, shape)
    return expr, (tile, view.strides[axis], view.shape[axis], expr.bounds())


def _check_index_tile(view: View, index: View, axis: int, first: bool) -> None:
    """An index tile chooses one row of HBM for each partition."""
    if view.on_chip:
        if index.size != 1:
            raise refuse(
                "err_indirect_indices_free_dim",
                f"axis {axis} of {view.label()} is indexed by {index.label()}, expected a "
                "single run-time offset on chip; choose elements with nl.where, and gather rows "
                "while loading from HBM",
            )
        return
    if index.free_size != 1 or (axis == view.ndim - 1 and not first):
        raise _index_tile_refusal(view, axis, index)


def _index_tile_refusal(view: View, axis: int, index: View) -> NkiError:
    return refuse(
        "err_indirect_indices_free_dim",
        f"axis {axis} of {view.label()} is indexed by {index.label()}, expected a (P, 1) "
        "index tile on the partition or a block axis; index rows by data and columns with "
        "nl.arange (nl.mgrid does not serve here)",
    )
