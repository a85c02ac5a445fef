"""``nl.matmul`` and ``nl.transpose`` on TensorE, with the copies that they need."""

from typing import Any

from ..device import written
from ..device.dtypes import FLOAT32
from ..device.errors import refuse, warn
from ..device.spec import GEN2, Engine
from ..instructions.entry import PSUM, SBUF
from ..instructions.recorder import ALIKE
from ..instructions.tensor_engine import (
    NC_MATMUL,
    NC_TRANSPOSE,
    collapsed,
    matmul_attrs,
    transpose_attrs,
)
from ..program import trace
from ..program.view import View
from . import copies
from .copies import tensor_copy
from .operands import choose_engine, fresh, isa, result_type


def _in_sbuf(operand: View) -> View:
    """The operand, a transpose that was assigned nowhere copied out of PSUM first."""
    producer = operand.storage.producer
    if operand.storage.buffer != PSUM or producer is None or producer.op is not NC_TRANSPOSE:
        return operand
    warn(
        "sim_transposed_operand",
        f"nc_matmul takes {operand.label()}, which nc_transpose made: TensorE reads SBUF only, the "
        "compiler adds a copy; assign the transpose to a tile in sbuf, or copy it explicitly",
    )
    return tensor_copy(operand)


@isa(NC_MATMUL)
def nc_matmul(
    stationary: View,
    moving: View,
    *,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    mask: Any = None,
    **extra: Any,
) -> View:
    """``stationary[K, M].T @ moving[K, N]`` on TensorE -> [M, N] fp32 @ PSUM.

    K <= 128 partitions, M <= 128, N <= 512; both operands in SBUF. ``acc[...] += nc_matmul(...)``
    on a PSUM tile from nl.zeros accumulates in fp32 inside PSUM.
    """
    left, right = collapsed(_in_sbuf(stationary)), collapsed(_in_sbuf(moving))
    for name in extra:
        if name not in ("tile_position", "tile_size"):
            raise refuse(
                "sim_unknown_keyword",
                f"nc_matmul got {name}=, which neuronxcc.nki lacks, expected operands alone; "
                + (written.assigned("nc_matmul") if name == "dst" else "drop it"),
            )
        warn("sim_newer_api", f"nc_matmul({name}=) needs SDK 2.22 or newer; drop it to run on 2.21")
    hints = bool(is_stationary_onezero), bool(is_moving_onezero)
    attrs = matmul_attrs(bool(is_transpose), *hints)
    shape = (left.free_size, right.free_size)
    dt = right.dt if is_transpose and right.dt is left.dt else FLOAT32
    if mask is not None:  # on [M, N]: M are the columns of one operand, N those of the other
        left = _one_free_axis(left)
        right = _one_free_axis(right)
    axes = (ALIKE, (None, 0), (None, 1))
    return fresh(NC_MATMUL, (left, right), attrs, dt, mask, shape, axes, shape, PSUM)


def _one_free_axis(operand: View) -> View:
    """The operand, or the refusal of a mask over columns that several axes make."""
    if operand.ndim == 2:
        return operand
    raise refuse(
        "sim_matmul_mask",
        f"mask of {operand.label()}, whose free axes are no single axis, expected one free axis; "
        "mask the operands in their subscripts instead",
    )


@isa(NC_TRANSPOSE)
def nc_transpose(data: View, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> View:
    """[P, F...] -> [F, P], free axes collapsed. TensorE up to 128 x 128, VectorE up to 32 x 32.

    TensorE (default above 32 x 32): SBUF -> PSUM, finite values only.
    """
    data = collapsed(data)
    choice = choose_engine(engine, "nc_transpose", NC_TRANSPOSE.engines)
    on_vector = choice is Engine.VECTOR
    dt = result_type(dtype, data.dt)
    if trace.current("nisa.nc_transpose").program.direct_allocation and not on_vector:
        raise refuse(
            "err_transpose_on_tensor_engine_not_allowed_in_allocated_kernel",
            f"nc_transpose of {data.label()} on TensorE needs a hidden identity tensor, expected "
            "engine=nisa.vector_engine under direct allocation; multiply by an identity tile of "
            "your own with nc_matmul(is_transpose=True)",
        )
    if mask is not None:
        data = _one_free_axis(data)
    return fresh(
        NC_TRANSPOSE,
        (data,),
        transpose_attrs(choice, dt is data.dt, data.ndim - 1),
        dt,
        mask,
        (data.free_size, data.shape[0]),
        axes=((1, 0), ALIKE),
        buffer=SBUF if on_vector else PSUM,
    )


def matmul(x: View, y: View, *, transpose_x: bool = False, mask: Any = None) -> View:
    """``x @ y``, or ``x.T @ y`` with x already [K, M] (transpose_x=True, no transpose needed).

    Result [M, N] fp32 in PSUM.
    """
    if not transpose_x:
        x = copies.tensor_copy(nc_transpose(x, engine=Engine.TENSOR))
    return nc_matmul(x, y, mask=mask)


def transpose(x: View, *, dtype: Any = None, mask: Any = None) -> View:
    """2-D transpose, both sides at most 128; result in SBUF."""
    if x.ndim != 2:
        raise refuse(
            "err_exceed_max_supported_dimension",
            f"transpose of {x.label()}, expected two axes; collapse the free axes first",
        )
    if max(x.shape) <= GEN2.vector_transpose_max:
        return nc_transpose(x, dtype=dtype, mask=mask, engine=Engine.VECTOR)
    if x.storage.buffer == "psum":
        x = copies.tensor_copy(x)
    return copies.copy_written(nc_transpose(x, mask=mask, engine=Engine.TENSOR), dtype)
