"""Recording an instruction: the one form that every front end and every instruction shares.

``record`` takes the entry, destination and source views and typed attributes, and nothing of any
calling convention; ``fresh`` does the same into a new tile. A mask is resolved here: a box cuts
sources and destinations alike, anything else stays as an array of booleans on the instruction.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..device.errors import refuse
from ..program import regions, trace
from ..program.attributes import Attrs
from ..program.program import Instruction
from ..program.view import View, nothings
from .entry import OpSpec

# For each axis of an operand the axis of the mask that cuts it (None, or beyond the end: none).
# ``None`` instead of a tuple: the operand has the mask's shape and is cut alike.
Axes = tuple["int | None", ...] | None
ALIKE: Axes = None
ROWS: Axes = (0,)
WHOLE: Axes = ()


def record(
    op: OpSpec,
    dst: tuple[View, ...],
    src: tuple[View, ...],
    attrs: Attrs,
    mask: Any = None,
    over: tuple[int, ...] | None = None,
    axes: Sequence[Axes] = (),
) -> Instruction | None:
    """Record ``op`` from ``src`` into ``dst``.

    Args:
        mask: comparisons of index expressions over a region of shape ``over``.
        over: by default the shape of the first destination.
        axes: how the mask cuts each of ``dst``, then each of ``src``; default: all of them alike.

    Returns:
        The instruction; None where the mask selects nothing, or leaves several boxes of a DMA or a
        reduction that are recorded one by one.

    Raises:
        NkiError: compiler or hardware would refuse the instruction, or the mask is no box and the
            instruction takes boxes only.
    """
    tracer = trace.active() or trace.current(f"nisa.{op.name}")
    cut = None if mask is None else regions.region(mask, dst[0].shape if over is None else over)
    if cut is regions.EMPTY or (nothings and not nothings.isdisjoint(map(type, (*dst, *src)))):
        return None
    if isinstance(cut, tuple):
        dst, src = _cut(dst, src, cut, axes)
        attrs = attrs.cut(cut)
    elif cut is not None:
        # every element of such a DMA is checked, and none outside of the mask touched
        if (op.is_dma and any(v.oob or v.by_data for v in (*dst, *src))) or op.flow == "reduce":
            for box in regions.boxes(cut):
                tracer.emit(op, *_cut(dst, src, box, axes), attrs)
            return None
        if op.box_mend is not None or attrs.reduce_axes:
            raise refuse(
                "sim_matmul_mask" if op.multiplies else "sim_reduce_mask",
                f"mask of {op.name} of {src[0].label()} is no box, expected one bound per axis; "
                f"{op.box_mend or 'mask whole rows or columns'}",
            )
        attrs = replace(attrs, mask=cut)
    return tracer.emit(op, dst, src, attrs)


def _cut(
    dst: tuple[View, ...], src: tuple[View, ...], box: tuple[slice, ...], axes: Sequence[Axes]
) -> tuple[tuple[View, ...], tuple[View, ...]]:
    """Destinations and sources of the part that a box of the mask's region leaves."""
    views = (*dst, *src)
    kept = [_cut_one(v, box, a) for v, a in zip(views, axes or [ALIKE] * len(views), strict=True)]
    return tuple(kept[: len(dst)]), tuple(kept[len(dst) :])


def _cut_one(view: View, box: tuple[slice, ...], axes: Axes) -> View:
    if axes is None:
        return view.slice_box(box)
    own = [slice(0, size) for size in view.shape]
    for axis, of_mask in enumerate(axes):
        if of_mask is not None:
            own[axis] = box[of_mask]
    return view.slice_box(tuple(own))
