"""``nki.meta.tensor``: arrays that are known while a kernel is built (leanprover/KLR, KLR/NKI).

Makers of constant arrays, for ``nl.shared_constant``.
"""

from typing import Any

import numpy as np

from neuron_cpu.core.current.types import element_type

__all__ = ["arange", "identity", "zeros"]


def zeros(shape: Any, dtype: Any) -> np.ndarray:
    """An array of zeros."""
    return np.zeros(shape, element_type(dtype).numpy)


def arange(start: int, stop: int, step: int = 1, dtype: Any = "int32") -> np.ndarray:
    """``start`` to before ``stop`` in steps."""
    return np.arange(start, stop, step).astype(element_type(dtype).numpy)


def identity(N: int, dtype: Any) -> np.ndarray:
    """The identity matrix of N rows."""
    return np.eye(N).astype(element_type(dtype).numpy)
