"""``nki.meta.tensor``: arrays that are known while a kernel is built (leanprover/KLR, KLR/NKI)."""

# Written by stubs/generate.py.
from typing import Any


def arange(start: Any, stop: Any, step: Any = 1, dtype: Any = 'int32') -> Any:
    """``start`` to before ``stop`` in steps."""
def identity(N: Any, dtype: Any) -> Any:
    """The identity matrix of N rows."""
def zeros(shape: Any, dtype: Any) -> Any:
    """An array of zeros."""
