"""The part of an operand that a mask leaves: all, nothing, a box, or single elements."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..device.errors import refuse
from .index import Mask

EMPTY = "empty"


def region(mask: Any, shape: tuple[int, ...]) -> Any:
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
        others = tuple(a for a in range(len(shape)) if a != axis)
        used = np.flatnonzero(keep.any(axis=others))
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
