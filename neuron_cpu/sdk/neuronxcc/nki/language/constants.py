"""``neuronxcc.nki.language.constants``: public kernels import helpers from here."""

from typing import Any

from neuron_cpu.core.device.dtypes import to_dtype

__all__ = ["sizeinbytes"]


def sizeinbytes(dtype: Any) -> int:
    """The bytes of one element of ``dtype``."""
    return to_dtype(dtype).itemsize
