"""Regions of storages: boxes, what masks leave, windows into per-element maps."""

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from ..device.dtypes import Shape
from ..device.errors import refuse
from .index import Mask
from .program import Instruction, Program
from .storage import Storage
from .view import View, contiguous

Box = tuple[tuple[int, int, int], ...]  # (first, last, step) per storage axis of more than one
FEW = 32  # boxes that are compared along their first axis


# --- boxes in the index space of a storage --------------------------------------------------------
# A view that is no box counts as the smallest box around it. An axis has a step where a view takes
# every n-th element of it.
def box_of(view: View) -> Box:
    """The view as one interval per axis of its storage."""
    return box(view.storage.shape, view.offset, view.shape, view.strides)


@functools.cache
def box(storage: Shape, offset: int, shape: Shape, strides: Shape) -> Box:
    """The region of a storage of this shape as one interval per axis."""
    # Where the view begins, in coordinates of the storage; then each of its axes widens the box.
    axes = [(size, unit) for size, unit in zip(storage, contiguous(storage)) if size > 1]
    first = []
    rest = offset
    for _, unit in axes:
        at, rest = divmod(rest, unit)
        first.append(at)
    last, step = list(first), [0] * len(axes)
    for count, stride in zip(shape, strides):
        if count > 1 and stride and not _extend(axes, first, last, step, count, stride):
            return _flat_box(axes, offset, shape, strides)
    return tuple((lo, hi, max(s, 1)) for lo, hi, s in zip(first, last, step))


def _extend(
    axes: list[tuple[int, int]],
    first: list[int],
    last: list[int],
    step: list[int],
    count: int,
    stride: int,
) -> bool:
    """Add one view axis to the box; False where it does not follow the storage's axes."""
    # The outermost axis of the storage that the view's stride takes whole steps along.
    at = next((k for k, (_, unit) in enumerate(axes) if stride % unit == 0 and stride >= unit), -1)
    if at < 0:
        return False
    hop = stride // axes[at][1]
    while at >= 0:
        size = axes[at][0]
        if last[at] + (count - 1) * hop < size:
            last[at] += (count - 1) * hop
            # Two axes of the view along one of the storage may meet any element between.
            step[at] = hop if step[at] == 0 else 1
            return True
        # a flattened run: fills this axis and goes on along the next outer one
        if size % hop or first[at] != last[at] or first[at] >= hop or count % (size // hop):
            return False
        last[at] += size - hop
        step[at] = hop
        count //= size // hop
        at, hop = at - 1, 1
    return False


def _flat_box(axes: list[tuple[int, int]], offset: int, shape: Shape, strides: Shape) -> Box:
    # First and last element in flat order: outer axes on which both agree are exact, so is the
    # range on the next one; further in anything may lie between.
    low = offset + sum((n - 1) * s for n, s in zip(shape, strides) if s < 0)
    high = offset + sum((n - 1) * s for n, s in zip(shape, strides) if s > 0)
    box = []
    same = True
    for size, unit in axes:
        lo, low = divmod(low, unit)
        hi, high = divmod(high, unit)
        box.append((lo, hi, 1) if same else (0, size - 1, 1))
        same = same and lo == hi
    return tuple(box)


def overlap(a: Box, b: Box) -> bool:
    """Whether two boxes of one storage share an element (steps are compared when equal)."""
    for (lo1, hi1, step1), (lo2, hi2, step2) in zip(a, b):
        if hi1 < lo2 or hi2 < lo1:
            return False
        # Equal steps that begin at different places never meet: even and odd columns.
        if step1 == step2 and step1 > 1 and (lo1 - lo2) % step1:
            return False
    return True


def contains(outer: Box, inner: Box) -> bool:
    return outer == inner or all(
        o[2] == 1 and o[0] <= i[0] and i[1] <= o[1] for o, i in zip(outer, inner)
    )


@functools.cache
def relations(boxes: tuple[Box, ...]) -> tuple[list[list[int]], list[list[int]]]:
    """For each region the regions that it overlaps, and those that it contains."""
    low, high = _line(boxes)
    order = sorted(range(len(boxes)), key=low.__getitem__)
    touching: list[list[int]] = [[] for _ in boxes]
    inside: list[list[int]] = [[] for _ in boxes]
    for at, i in enumerate(order):
        for j in islice(order, at, None):
            if low[j] > high[i]:
                break  # sorted along the line: nothing further on can overlap
            if overlap(boxes[i], boxes[j]):
                touching[i].append(j)
                if contains(boxes[i], boxes[j]):
                    inside[i].append(j)
                if i != j:
                    touching[j].append(i)
                    if contains(boxes[j], boxes[i]):
                        inside[j].append(i)
    return touching, inside


def _line(boxes: Sequence[Box]) -> tuple[list[int], list[int]]:
    """An interval for each box, of which two are disjoint only where the boxes are.

    Along one axis, or along the flattened axes after the first one, whichever leaves the fewest
    pairs to compare: the columns of a wide tile all hold the same partitions, and a tensor of many
    small rows has as many columns in each.
    """
    if len(boxes) < FEW or len(boxes[0]) < 2:
        firsts = [box[0] if box else (0, 0, 1) for box in boxes]
        return [lo for lo, _, _ in firsts], [hi for _, hi, _ in firsts]
    ends = np.array([[(lo, hi) for lo, hi, _ in box] for box in boxes], np.int64)
    sizes = ends[:, 1:, 1].max(axis=0) + 1
    units = np.concatenate([np.cumprod(sizes[:0:-1])[::-1], [1]])
    flat = np.tensordot(ends[:, 1:], units, axes=([1], [0]))
    best = min([ends[:, axis] for axis in range(ends.shape[1])] + [flat], key=_pairs)
    return best[:, 0].tolist(), best[:, 1].tolist()


def _pairs(line: np.ndarray) -> int:
    """How many pairs of intervals a sweep compares, each with itself and those before it too."""
    return int(np.searchsorted(np.sort(line[:, 0]), line[:, 1], "right").sum())


EMPTY = "empty"


# --- what a mask leaves: all, nothing, a box, or single elements ----------------------------------
def region(mask: Any, shape: Shape) -> Any:
    """The part of an operand region that a mask leaves.

    Returns:
        None (all of it), EMPTY, a tuple of slices (a box), or a boolean array of ``shape``.
    """
    if mask is None or mask is True:
        return None
    if isinstance(mask, (bool, np.bool_)):
        return None if mask else EMPTY
    if not isinstance(mask, Mask):
        raise refuse(
            "err_unsupported_expression_in_mask",
            f"mask of type {type(mask).__name__}, expected comparisons of index expressions joined "
            "with '&'; use nl.where for conditions on data",
        )
    keep = mask.evaluate(shape)
    if keep.all():
        return None
    if not keep.any():
        return EMPTY
    # The smallest box around what is kept; the mask is a box where it keeps as many elements.
    keep = np.broadcast_to(keep, shape)
    box = []
    inside = 1
    for axis in range(len(shape)):
        used = np.flatnonzero(keep.any(axis=tuple(a for a in range(len(shape)) if a != axis)))
        box.append(slice(int(used[0]), int(used[-1]) + 1))
        inside *= int(used[-1] - used[0] + 1)
    return tuple(box) if inside == np.count_nonzero(keep) else keep


def boxes(keep: np.ndarray) -> Iterator[tuple[slice, ...]]:
    """The boxes that a boolean array consists of: runs of equal slices, axis after axis."""
    start = 0
    while start < len(keep):
        end = start + 1
        while end < len(keep) and np.array_equal(keep[end], keep[start]):
            end += 1
        if keep.ndim == 1 and keep[start]:
            yield (slice(start, end),)
        elif keep.ndim > 1 and keep[start].any():
            for rest in boxes(keep[start]):
                yield (slice(start, end), *rest)
        start = end


# --- per-element maps -----------------------------------------------------------------------------
def place(program: Program, instruction: Instruction) -> str:
    """``kernel (file:line)`` of an instruction, as refusals name it."""
    return f"{program.name} ({instruction.source})" if instruction.source else program.name


def window(flat: np.ndarray, view: View) -> np.ndarray:
    """The elements of ``view`` in a per-element array of its storage; shares memory.

    np.ndarray instead of as_strided: 0.4 us instead of 5 us, and it checks the bounds.
    """
    item = flat.itemsize
    if item == 1:
        return np.ndarray(view.shape, flat.dtype, flat, view.offset, view.strides)
    strides = tuple(s * item for s in view.strides)
    return np.ndarray(view.shape, flat.dtype, flat, view.offset * item, strides)


def elements(view: View, mask: np.ndarray) -> np.ndarray:
    """Flat element numbers of ``view`` where ``mask`` holds."""
    at = np.full((1,) * len(view.shape), view.offset, np.int64)
    for axis, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        line = [1] * len(view.shape)
        line[axis] = size
        at = at + stride * np.arange(size).reshape(line)
    return np.broadcast_to(at, view.shape)[mask]


def grounded(view: View, mask: Any) -> tuple[View, Any]:
    """A view and its mask in the common elements of its memory."""
    common = view.grounded()
    if common is not view and mask is not None:
        mask = np.broadcast_to(mask[..., None], common.shape)
    return common, mask


def covers_storage(view: View) -> bool:
    """True when the view holds every element of its storage (in any order)."""
    if view.offset or view.by_data is not None:
        return False
    return _distinct(view.shape, view.strides) == view.storage.size


@functools.cache
def _distinct(shape: Shape, strides: Shape) -> int:
    """How many elements they take, 0 where a stride of 0 counts one twice."""
    return math.prod(shape) * all(s or n == 1 for n, s in zip(shape, strides))


def first_box(flags: np.ndarray) -> tuple[slice, ...]:
    """The box that grows, last axis first, from the first set element while all of it is set."""
    start = np.unravel_index(int(np.argmax(flags)), flags.shape)
    # Last axis first: messages name a range of columns of one row rather than the reverse.
    box = [slice(int(s), int(s) + 1) for s in start]
    for axis in reversed(range(flags.ndim)):
        first = box[axis].start
        wider = flags[(*box[:axis], slice(first, None), *box[axis + 1 :])]
        full = wider.all(axis=tuple(other for other in range(flags.ndim) if other != axis))
        box[axis] = slice(first, first + int(np.argmin(np.append(full, False))))
    return tuple(box)


def box_text(flags: np.ndarray, storage: Storage) -> str:
    """``name[a:b, c:d]`` for the first box of set elements of a storage."""
    ranges = ", ".join(f"{s.start}:{s.stop}" for s in first_box(flags.reshape(storage.shape)))
    return f"{storage.name or f'{storage.buffer} tensor'}[{ranges}]"
