"""Views as boxes in the index space of their storage, and which boxes meet.

A view that is no box counts as the smallest box around it. An axis has a step where a view takes
every n-th element of it.
"""

import functools
from collections.abc import Sequence
from itertools import islice

import numpy as np

from .view import View, contiguous

Box = tuple[tuple[int, int, int], ...]  # (first, last, step) per storage axis of more than one
FEW = 32  # boxes that are compared along their first axis


def box_of(view: View) -> Box:
    """The view as one interval per axis of its storage."""
    return box(view.storage.shape, view.offset, view.shape, view.strides)


@functools.cache
def box(
    storage: tuple[int, ...], offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Box:
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


def _flat_box(
    axes: list[tuple[int, int]], offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Box:
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
    lines = [ends[:, axis] for axis in range(ends.shape[1])] + [flat]
    best = min(lines, key=_pairs)
    return best[:, 0].tolist(), best[:, 1].tolist()


def _pairs(line: np.ndarray) -> int:
    """How many pairs of intervals a sweep compares, each with itself and those before it too."""
    return int(np.searchsorted(np.sort(line[:, 0]), line[:, 1], "right").sum())
