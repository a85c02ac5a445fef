"""Where older builds of TorchNeuron have `nki_op` and `wrap_nki`."""

from . import nki_op, wrap_nki

__all__ = ["nki_op", "wrap_nki"]
