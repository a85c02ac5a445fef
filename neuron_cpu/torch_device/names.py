"""What the newer `torch_neuronx` offers."""

from .kernels import nki_op, wrap_nki
from .module import *  # noqa: F403

__all__ = ["nki_op", "wrap_nki"]
