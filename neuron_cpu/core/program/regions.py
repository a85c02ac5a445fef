"""Element regions of storages: windows into per-element maps, and boxes for messages."""

from typing import Any

import numpy as np

from .program import Instruction, Program
from .storage import Storage
from .view import View


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
    # As many elements as the storage, no stride 0 among them: nothing is counted twice.
    size = 1
    for length, stride in zip(view.shape, view.strides, strict=True):
        if length != 1 and not stride:
            return False
        size *= length
    return size == view.storage.size


def first_box(flags: np.ndarray) -> tuple[slice, ...]:
    """The box that grows, last axis first, from the first set element while all of it is set."""
    start = np.unravel_index(int(np.argmax(flags)), flags.shape)
    # Last axis first: messages name a range of columns of one row rather than the reverse.
    box = [slice(int(s), int(s) + 1) for s in start]
    for axis in reversed(range(flags.ndim)):
        stop = box[axis].stop
        while stop < flags.shape[axis]:
            wider = (*box[:axis], slice(stop, stop + 1), *box[axis + 1 :])
            if not flags[wider].all():
                break
            stop += 1
        box[axis] = slice(box[axis].start, stop)
    return tuple(box)


def box_text(flags: np.ndarray, storage: Storage) -> str:
    """``name[a:b, c:d]`` for the first box of set elements of a storage."""
    box = first_box(flags.reshape(storage.shape))
    ranges = ", ".join(f"{s.start}:{s.stop}" for s in box)
    return f"{storage.name or f'{storage.buffer} tensor'}[{ranges}]"
