"""Names of Lite that mean what TorchNeuron's mean.

Source: aws-neuron/vllm-omni-neuron cb7cf2b, lite_compat.py and bootstrap.py. Lite's own rules (no
eager collectives on the device, its registry of meshes) are not imitated.
"""

import os

from neuron_cpu.closed import name_modules
from neuron_cpu.core.device.target import DEFAULT, ENVIRONMENT_VARIABLE


def get_platform_target() -> str:
    """The chip that kernels are built for: trn2, trn3, ..."""
    return os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT


name_modules(
    __name__,
    """
nki.nki_hop torch_neuronx wrap_nki
_compiler.nki_op torch_neuronx nki_op
compile.platform . get_platform_target
""",
)
