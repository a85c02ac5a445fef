"""``nl.matmul`` and ``nl.transpose`` on TensorE, with the copies that they need."""

from typing import Any

from ..device.errors import refuse
from ..device.spec import GEN2, Engine
from ..instructions import copies, tensor_engine
from ..instructions.arguments import tile
from ..program.view import View


def matmul(x: Any, y: Any, *, transpose_x: bool = False, mask: Any = None) -> View:
    """``x @ y``, or ``x.T @ y`` with x already [K, M] (transpose_x=True, no transpose needed).

    Result [M, N] fp32 in PSUM.
    """
    left = tile(x, "matmul")
    if not transpose_x:
        left = copies.tensor_copy(tensor_engine.nc_transpose(left, engine=Engine.TENSOR))
    return tensor_engine.nc_matmul(left, y, mask=mask)


def transpose(x: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """2-D transpose, both sides at most 128; result in SBUF."""
    source = tile(x, "transpose")
    if source.ndim != 2:
        raise refuse(
            "err_exceed_max_supported_dimension",
            f"transpose of {source.label()}, expected two axes; collapse the free axes first",
        )
    if max(source.shape) <= GEN2.vector_transpose_max:
        return tensor_engine.nc_transpose(source, dtype=dtype, mask=mask, engine=Engine.VECTOR)
    if source.storage.buffer == "psum":
        source = copies.tensor_copy(source)
    made = tensor_engine.nc_transpose(source, mask=mask, engine=Engine.TENSOR)
    return copies.copy_written(made, dtype)
