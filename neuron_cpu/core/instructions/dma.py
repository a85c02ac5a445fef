"""DMA: copies between HBM and SBUF, and transposes."""

from __future__ import annotations

from typing import Any

import torch

from ..device.dtypes import to_dtype
from ..device.errors import refuse
from ..device.spec import GEN2, Engine
from ..program import trace
from ..program.program import Instruction
from ..program.view import View
from . import operators
from .arguments import tile
from .constants import dge_mode, oob_mode
from .entry import ANY_HBM, SBUF, define, first_operand
from .recorder import record_fresh


def _no_cycles(i: Instruction) -> float:
    return 0.0  # DMA time is bytes and descriptors, see schedule.py


def _dma_rules(i: Instruction) -> None:
    for view in (*i.dst, i.src[0]):
        if view.storage.on_chip and len(view.shape) < 2:
            raise refuse("sim_rank", f"Insufficient rank: {view.label()}, expected at least 2 axes")
        if view.storage.on_chip and view.shape[0] > GEN2.partitions:
            raise refuse(
                "err_num_partition_exceed_arch_limit",
                f"Size of partition dimension {view.shape[0]} exceeds architecture limitation of "
                f"{GEN2.partitions} in dma of {view.label()}; tile the partition axis",
            )


DMA_COPY = define(
    "dma_copy", engine=Engine.DMA, reads=("hbm", "shared_hbm", SBUF), writes=(*ANY_HBM, SBUF),
    flow="copy", compute=first_operand, cycles=_no_cycles, rules=_dma_rules, same_partitions=False,
    indirect=True,
    note="HBM/SBUF to HBM/SBUF with cast; nl.load and nl.store; rows may be indirect",
)  # fmt: skip


def _dma_options(oob: Any, dge: Any) -> None:
    """Refuse descriptor options that NeuronCore-v2 has no hardware for."""
    if dge is dge_mode.hwdge or oob is not oob_mode.error:
        raise refuse(
            "sim_newer_core",
            f"dma_copy with {dge} and {oob}, expected descriptors made in advance and "
            "oob_mode.error on NeuronCore-v2; drop the options and mask rows out of bounds",
        )


def dma_copy(
    src: Any,
    dst: Any,
    *,
    mask: Any = None,
    dst_rmw_op: Any = None,
    oob_mode: Any = oob_mode.error,
    dge_mode: Any = None,
) -> None:
    """Copy ``src`` to ``dst`` (HBM or SBUF each) with a cast where the types differ.

    ``dst_rmw_op=np.add`` adds to what ``dst`` holds (SDK 2.23).
    """
    _dma_options(oob_mode, dge_mode)
    source, target = tile(src, "dma_copy"), tile(dst, "dma_copy")
    rmw = None if dst_rmw_op is None else operators.name_of(dst_rmw_op)
    if rmw not in (None, "add"):
        raise refuse(
            "sim_rmw_operator",
            f"dma_copy with dst_rmw_op '{rmw}', expected add; combine the values on chip",
        )
    move(target, source, mask, rmw)


def move(dst: View, src: View, mask: Any = None, rmw: str | None = None) -> None:
    """Record one DMA between views of equal shape (size-1 axes aside); ``rmw`` adds instead."""
    if dst.shape != src.shape:
        squeezed = [s for s in src.shape if s != 1]
        if squeezed != [s for s in dst.shape if s != 1]:
            raise refuse(
                "err_store_dst_shape_smaller_than_other_shape",
                f"dma of {src.label()} to a region of shape {dst.shape}, expected equal shapes; "
                "slice both sides alike",
            )
        if src.on_chip and not dst.on_chip and dst.indirect is None:
            dst = dst.reshape(src.shape)
        else:
            src = src.reshape(dst.shape)
    attrs: dict[str, Any] = {"raw": True} if src.dt is dst.dt and rmw is None else {}
    if rmw is not None:
        attrs["rmw"] = rmw
    cut = trace.region(mask, dst.shape) if mask is not None else None
    if cut is trace.EMPTY:
        return
    transfer(dst, src, attrs, cut)


def transfer(dst: View, src: View, attrs: dict[str, Any], cut: Any) -> Instruction:
    """Record a DMA of what a mask leaves: a box, or an array of booleans.

    Where the region reaches outside of its tensor, a mask that is no box becomes one DMA for each
    box it consists of, so that every element is checked and none outside is touched.
    """
    tracer = trace.current("dma")
    if isinstance(cut, tuple):
        return tracer.emit(DMA_COPY, (dst.slice_box(cut),), (src.slice_box(cut),), attrs)
    if cut is None:
        return tracer.emit(DMA_COPY, (dst,), (src,), attrs)
    if dst.oob or src.oob or dst.indirect or src.indirect:
        for box in trace.boxes(cut):
            last = tracer.emit(DMA_COPY, (dst.slice_box(box),), (src.slice_box(box),), attrs)
        return last
    return tracer.emit(DMA_COPY, (dst,), (src,), {**attrs, "mask": cut})


def _transpose_dma(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    nd = len(attrs["axes_order"])
    lead = xs[0].ndim - nd
    return xs[0].permute(*range(lead), *(lead + a for a in attrs["axes_order"]))


DMA_TRANSPOSE = define(
    "dma_transpose", engine=Engine.DMA, reads=("hbm", "shared_hbm", SBUF), writes=(SBUF,),
    flow="permute", compute=_transpose_dma, cycles=_no_cycles, same_partitions=False,
    note="element-granular descriptors: very slow on this core",
)  # fmt: skip
TRANSPOSED_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def dma_transpose(src: Any, *, axes: Any = None, mask: Any = None, dtype: Any = None) -> View:
    """Transpose by DMA into a new SBUF tile: 2-D [1, 0], 3-D [2, 1, 0], 4-D [3, 1, 2, 0].

    ``src`` @ HBM|SBUF. Element-granular descriptors: very slow on this core.
    """
    source = tile(src, "dma_transpose")
    order = TRANSPOSED_AXES.get(source.ndim)
    if order is None or (axes is not None and tuple(axes) != order):
        raise refuse(
            "sim_dma_transpose_axes",
            f"dma_transpose of {source.label()} with axes {axes}, expected 2 to 4 axes and the "
            f"order {order or list(TRANSPOSED_AXES.values())}",
        )
    dt = source.dt if dtype is None else to_dtype(dtype)
    attrs: dict[str, Any] = {"axes_order": order} | ({"raw": True} if dt is source.dt else {})
    shape = tuple(source.shape[a] for a in order)
    if shape[0] > GEN2.partitions:
        raise refuse(
            "err_num_partition_exceed_arch_limit",
            f"Size of partition dimension {shape[0]} exceeds architecture limitation of "
            f"{GEN2.partitions} in dma_transpose of {source.label()}; transpose in blocks",
        )
    return record_fresh(DMA_TRANSPOSE, shape, dt, (source,), attrs, mask, order)
