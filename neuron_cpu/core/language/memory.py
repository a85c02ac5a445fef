"""Between HBM and the chip, copies on the chip, and other shapes of a tile.

Signatures: aws-neuron-sdk v2.21.1, general/nki/api/nki/language/__init__.py.
"""

from typing import Any

import numpy as np

from ..device import release
from ..device.dtypes import Shape
from ..device.errors import refuse, warn
from ..device.spec import GEN2
from ..instructions.alu import named
from ..instructions.entry import pattern_axes
from ..instructions.tensor_engine import collapsed
from ..program import regions, trace
from ..program.view import View
from . import compute, copies, products
from .assignment import assign
from .creation import ndarray
from .operands import name_of, tile
from .tensor import sizes_of


# --- HBM ------------------------------------------------------------------------------------------
def load(src: View, *, mask: Any = None, dtype: Any = None, mode: Any = None) -> View:
    """HBM region -> new SBUF tile of the same shape (P first, at most 128), optionally cast.

    ``mode`` is what becomes of chosen rows out of bounds, as NxD Inference 0.4 asks for it
    (modules/chunked_prefill/paged_cache.py): with ``oob_mode.skip`` a tile that the result is
    assigned to keeps its own.
    """
    if src.on_chip:
        raise refuse(
            "err_unsupported_memory",
            f"Expected operand 'src' of 'load' to be in address space 'hbm', got {src.label()}; "
            "use nl.copy between on-chip tensors",
        )
    column = src.ndim == 1
    while src.ndim < 2:  # a 1-D region is a column, one of its elements a (1, 1) tile
        src = src.expand_dims(src.ndim)
    if src.shape[0] > GEN2.partitions:
        mend = f"load {GEN2.partitions} rows at a time"
        if column:
            name, count = src.storage.name, src.shape[0]
            mend = f"load it as one row: {name}.reshape((1, {count}))"
        raise refuse(
            "err_num_partition_exceed_arch_limit",
            f"Size of partition dimension {src.shape[0]} exceeds architecture limitation of "
            f"{GEN2.partitions} in load of {src.label()}; {mend}",
        )
    whole = src.storage.shape[-2:]
    window = src.ndim > 2 and all(n < m for n, m in zip(src.shape[-2:], whole))
    if window and not release.since("2.22") and pattern_axes(src) > 1:
        warn(
            "sim_bubbles",
            f"nl.load of {src.label()} leaves out elements of its last two axes, expected "
            "whole rows; load them and slice the tile",
        )
    return copies.transfer(src, dtype, mask, copies.skips("load", mode, src))


def store(dst: View, value: Any, *, mask: Any = None) -> None:
    """SBUF tile (or a constant) -> HBM region of equal shape; casts to the HBM type."""
    if dst.on_chip:
        raise refuse(
            "err_unsupported_memory",
            f"Expected operand 'dst' of 'store' to be in address space 'hbm', got "
            f"{dst.label()}; give a result buffer=nl.shared_hbm, or assign on chip with "
            "dst[...] = value",
        )
    if isinstance(value, (int, float, np.generic)):
        dst = dst if dst.ndim else dst.expand_dims(0)  # one element
        shape = dst.shape if dst.ndim > 1 else (1, *dst.shape)
        value = copies.memset(shape, value, dst.dtype)
    value = tile(value, "store")
    if not value.on_chip:
        raise refuse(
            "err_unsupported_memory",
            f"Expected operand 'value' of 'store' to be in address space 'sbuf', got "
            f"{value.label()}; copy between HBM tensors with nisa.dma_copy",
        )
    if value.storage.buffer == "psum":
        value = copies.tensor_copy(value)
    copies.move(dst, value, mask)


def load_transpose2d(src: View, *, mask: Any = None, dtype: Any = None) -> View:
    """HBM [F, P] -> SBUF [P, F] by DMA (element-granular: slow on this core)."""
    if src.ndim != 2:
        raise refuse(
            "err_exceed_max_supported_dimension",
            f"load_transpose2d of {src.label()}, expected two axes; index the others first",
        )
    return copies.transposed(src, (1, 0), dtype, mask)


def atomic_rmw(dst: View, value: View, op: Any, *, mask: Any = None) -> None:
    """``dst[rows] op= value`` in HBM, rows chosen by an index tile; add only, duplicates add up."""
    name = name_of(op)
    if dst.by_data is None or dst.on_chip or name != "add":
        raise refuse(
            "sim_atomic_rmw",
            f"atomic_rmw of {dst.label()} with '{name}', expected add and an HBM tensor whose "
            "rows an index tile chooses; use nl.store for rows known while tracing",
        )
    copies.move(dst, value, mask, accumulate=True)


# --- on chip --------------------------------------------------------------------------------------
def copy(src: View, *, mask: Any = None, dtype: Any = None) -> View:
    """On-chip copy into a new SBUF tile, with a cast if ``dtype`` is given."""
    if not src.on_chip:
        raise refuse(
            "err_unsupported_memory",
            f"copy got {src.label()}, expected a tile in sbuf or psum; load it with nl.load",
        )
    return copies.tensor_copy(src, mask=mask, dtype=dtype)


def device_print(prefix: Any, x: View, *, mask: Any = None, **_: Any) -> None:
    """Print a tile's values in eager mode (NKI_CPU_EAGER=1); nothing is computed otherwise."""
    if trace.current("nl.device_print").machine is None:
        warn(
            "sim_device_print",
            "device_print outside of eager mode prints nothing, expected NKI_CPU_EAGER=1; set it",
        )
        return
    if regions.region(mask, x.shape) is not regions.EMPTY:
        print(prefix, x.numpy())  # type: ignore[attr-defined]


# --- other shapes ---------------------------------------------------------------------------------
def partition_broadcast(source: View, shape: Shape) -> View:
    """One partition to ``shape[0]`` partitions: ones-matmul on TensorE, then a copy to SBUF.

    The product with a ones column is exact; each piece of 512 columns fills one PSUM bank.
    Integers take the same way as fp32, 32-bit ones as two halves.
    """
    rows = shape[0]
    row = source if source.storage.buffer == "sbuf" else copies.tensor_copy(source)
    if row.dt.is_int:
        return _integer_broadcast(row, shape)
    # One free axis for TensorE; a row whose strides do not allow that is copied first.
    row = row.widened((1, *shape[1:])) if row.shape[1:] != shape[1:] else row
    flat = collapsed(row)
    if flat.ndim != 2:
        flat = copies.tensor_copy(row).reshape((1, row.free_size))
    ones_row = copies.memset((1, rows), 1, row.dtype)
    out = ndarray((rows, flat.shape[1]), row.dtype)
    step = GEN2.moving_free_max
    for start in range(0, flat.shape[1], step):
        columns = slice(start, min(start + step, flat.shape[1]))
        piece = flat.slice_box((slice(0, 1), columns))
        assign(out.slice_box((slice(0, rows), columns)), products.nc_matmul(ones_row, piece))
    return out.reshape(shape) if len(shape) != 2 else out


def _integer_broadcast(row: View, shape: Shape) -> View:
    """partition_broadcast of an integer row, exact: fp32 holds every value of up to 24 bits."""

    def spread(part: View) -> View:
        wide = partition_broadcast(copies.tensor_copy(part, dtype=np.float32), shape)
        return copies.tensor_copy(wide, dtype=row.dtype)

    if row.dt.itemsize < 4:
        return spread(row)
    # Two halves of 16 bits pass exactly; the upper one is shifted back into its place.
    high = compute.tensor_scalar(row, np.right_shift, 16)
    low = compute.tensor_scalar(row, np.bitwise_and, 0xFFFF)
    high = compute.tensor_scalar(spread(high), np.left_shift, 16)
    return compute.tensor_tensor(high, spread(low), np.bitwise_or)


def broadcast_to(src: View, *, shape: Any) -> View:
    """numpy broadcasting (SDK 2.22); from one partition to many a ones-matmul on the device."""
    new = sizes_of((shape,), None)
    if src.ndim > len(new) >= 2 and all(s == 1 for s in src.shape[len(new) :]):
        src = src.reshape(src.shape[: len(new)])  # axes of an mgrid that are named, of size 1
    if src.on_chip and src.shape[0] == 1 and len(new) == src.ndim and new[0] > 1:
        return partition_broadcast(src, new)
    return src.widened(new)


def expand_dims(data: View, axis: int) -> View:
    """A size-1 axis after the last one."""
    if axis not in (data.ndim, -1):
        raise refuse(
            "sim_expand_dims",
            f"expand_dims of {data.label()} at axis {axis}, expected {data.ndim} or -1: only "
            "positions after the last axis are supported; for others use tile.reshape(shape)",
        )
    return data.expand_dims(data.ndim)


named("copy", copy)
