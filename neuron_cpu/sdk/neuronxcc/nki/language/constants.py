"""``neuronxcc.nki.language.constants``: helpers that public kernels import from there."""

from typing import Any

from neuron_cpu.core.device.dtypes import to_dtype

__all__ = ["sizeinbytes"]


def sizeinbytes(dtype: Any) -> int:
    """Bytes of one element of ``dtype``."""
    return to_dtype(dtype).itemsize
