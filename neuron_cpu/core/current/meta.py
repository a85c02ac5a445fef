"""``nki.meta.tensor``: arrays that are known while a kernel is built (leanprover/KLR, KLR/NKI)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .types import element_type


class tensor:
    """Makers of constant arrays, for ``nl.shared_constant``."""

    @staticmethod
    def zeros(shape: Any, dtype: Any) -> np.ndarray:
        return np.zeros(shape, element_type(dtype).numpy)

    @staticmethod
    def arange(start: int, stop: int, step: int = 1, dtype: Any = "int32") -> np.ndarray:
        return np.arange(start, stop, step).astype(element_type(dtype).numpy)

    @staticmethod
    def identity(N: int, dtype: Any) -> np.ndarray:
        return np.eye(N).astype(element_type(dtype).numpy)
