"""``nki.tensor``: the name of ``nki.meta.tensor`` before SDK 2.28; public kernels still use it."""

from .meta.tensor import arange, identity, zeros

__all__ = ["arange", "identity", "zeros"]
