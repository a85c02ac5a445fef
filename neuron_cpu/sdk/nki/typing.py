"""``nki.typing``: shapes of parameters, as ``nt.tensor[128, 512]``."""

from neuron_cpu.core.language.annotation import mutable_tensor, tensor

__all__ = ["mutable_tensor", "tensor"]
