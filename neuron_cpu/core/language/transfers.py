"""``nki.isa``: DMA.

Sources: aws-neuron-sdk v2.21.1 to v2.26.1, general/nki/api/nki/isa/__init__.py.
"""

from typing import Any

from ..device.errors import refuse, warn
from ..device.spec import CORE
from ..instructions.constants import dge_mode as descriptor_modes
from ..instructions.constants import oob_mode as bound_modes
from ..instructions.dma import DMA_COPY, DMA_TRANSPOSE, PermuteAttrs, transposed_axes
from ..instructions.recorder import ALIKE, record
from ..program.attributes import CAST, RAW, Attrs
from ..program.view import View
from .operands import fresh, isa, name_of, result_type, tile


def transfer(src: View, dtype: Any, mask: Any) -> View:
    """A new SBUF tile with the data of ``src``, brought by a DMA."""
    dt = result_type(dtype, src.dt)
    return fresh(DMA_COPY, src.shape, dt, (src,), RAW if dt is src.dt else CAST, mask)


def move(dst: View, src: View, mask: Any = None, accumulate: bool = False) -> None:
    """Record one DMA between views of equal shape, axes of size 1 aside.

    Args:
        accumulate: add to what ``dst`` holds instead of replacing it.
    """
    if dst.shape != src.shape:
        if [s for s in src.shape if s != 1] != [s for s in dst.shape if s != 1]:
            raise refuse(
                "err_store_dst_shape_smaller_than_other_shape",
                f"dma of {src.label()} to a region of shape {dst.shape}, expected equal shapes; "
                "slice both sides alike"
                + (", inside of both: a slice is not cut to its tensor" if src.oob else ""),
            )
        if src.on_chip and not dst.on_chip and dst.by_data is None:
            dst = dst.reshape(src.shape)
        else:
            src = src.reshape(dst.shape)
    attrs = RAW if src.dt is dst.dt else CAST
    if accumulate:  # a sum goes through fp32
        attrs = Attrs(accumulate=True)
    record(DMA_COPY, (dst,), (src,), attrs, mask)


@isa(DMA_COPY)
def dma_copy(
    src: Any,
    dst: Any,
    *,
    mask: Any = None,
    dst_rmw_op: Any = None,
    oob_mode: Any = bound_modes.error,
    dge_mode: Any = None,
) -> None:
    """Copy ``src`` to ``dst`` (HBM or SBUF each) with a cast where the types differ.

    ``dst_rmw_op=np.add`` adds to what ``dst`` holds (SDK 2.23).
    """
    source, target = tile(src, "dma_copy"), tile(dst, "dma_copy")
    # Only rows chosen by data can be skipped; without any the mode has nothing to do, and public
    # kernels that name it so ran.
    by_data = source.by_data is not None or target.by_data is not None
    skips = oob_mode is not bound_modes.error and by_data
    if dge_mode is descriptor_modes.hwdge or skips:
        raise refuse(
            "sim_newer_core",
            f"dma_copy with {dge_mode} and {oob_mode}, expected descriptors made in advance and "
            "oob_mode.error on NeuronCore-v2; drop the options and mask rows out of bounds",
        )
    operator = None if dst_rmw_op is None else name_of(dst_rmw_op)
    if operator not in (None, "add"):
        raise refuse(
            "sim_rmw_operator",
            f"dma_copy with dst_rmw_op '{operator}', expected add; combine the values on chip",
        )
    if target.on_chip and source.shape[0] > 1 and not source.strides[0]:
        warn(
            "sim_refused_on_device",
            f"dma_copy repeats one row of {source.label()} over {source.shape[0]} partitions: "
            f"a device's compiler could not lower that ({_TRIED}, mamba_v3b); load the row, repeat "
            "it with nl.broadcast_to or a product with ones",
        )
    move(target, source, mask, accumulate=operator is not None)


_TRIED = "Jerry2423/kda-for-trainium 90770f2"


def transposed(src: View, order: tuple[int, ...], dtype: Any, mask: Any) -> View:
    """A new SBUF tile with the axes of ``src`` in another order."""
    dt = result_type(dtype, src.dt)
    attrs = PermuteAttrs(raw=dt is src.dt, order=order)
    shape = tuple(src.shape[a] for a in order)
    return fresh(DMA_TRANSPOSE, shape, dt, (src,), attrs, mask, src.shape, (order, ALIKE))


@isa(DMA_TRANSPOSE)
def dma_transpose(src: Any, *, axes: Any = None, mask: Any = None, dtype: Any = None) -> View:
    """Transpose by DMA into a new SBUF tile: 2-D [1, 0], 3-D [2, 1, 0], 4-D [3, 1, 2, 0].

    ``src`` @ HBM|SBUF. Element-granular descriptors: very slow on this core.
    """
    source = tile(src, "dma_transpose")
    order = transposed_axes(source, axes)
    rows = source.shape[order[0]]
    if rows > CORE.partitions:
        raise refuse(
            "err_num_partition_exceed_arch_limit",
            f"Size of partition dimension {rows} exceeds architecture limitation of "
            f"{CORE.partitions} in dma_transpose of {source.label()}; transpose in blocks",
        )
    if source.dt.itemsize > 2:
        warn(
            "sim_transposed_words",
            f"dma_transpose of {source.label()}, expected a 2-byte type: of fp32 a device's "
            f"compiler ended with an internal error ({_TRIED}, rmsnorm_matmul's probe); use "
            "nisa.nc_transpose",
        )
    return transposed(source, order, dtype, mask)
