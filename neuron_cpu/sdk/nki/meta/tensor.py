"""``nki.meta.tensor``: constant arrays for ``nl.shared_constant``."""

from neuron_cpu.core.current.meta import arange, identity, zeros

__all__ = ["arange", "identity", "zeros"]
