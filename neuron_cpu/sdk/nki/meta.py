"""``nki.meta``: arrays that are known while a kernel is built."""

from neuron_cpu.core.current.meta import tensor

__all__ = ["tensor"]
