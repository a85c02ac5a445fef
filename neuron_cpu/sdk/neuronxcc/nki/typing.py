"""``neuronxcc.nki.typing``: annotations of kernel tensors."""

from typing import Optional

from neuron_cpu.core.language.annotation import mutable, mutable_tensor, tensor

__all__ = ["Optional", "mutable", "mutable_tensor", "tensor"]
