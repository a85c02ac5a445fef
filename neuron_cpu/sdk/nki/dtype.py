"""``nki.dtype``: the element types, for annotations."""

from neuron_cpu.core.current.types import NAMES as _NAMES

globals().update(_NAMES)
__all__ = [*_NAMES]
