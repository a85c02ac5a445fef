"""``nki.meta``: arrays that are known while a kernel is built."""

from . import tensor

__all__ = ["tensor"]
