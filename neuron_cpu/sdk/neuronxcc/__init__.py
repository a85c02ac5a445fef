"""The import names of the Neuron compiler's package, over the simulator in neuron_cpu.core."""

from neuron_cpu.closed import stand_for

# Of neuronx-cc in SDK 2.21, whose language is the default of `neuronxcc.nki`: its release notes.
__version__ = "2.16.372.0"

stand_for(
    *("neuronxcc.nki." + part for part in ("_private_kernels", "_pre_prod_kernels", "_private")),
    *("neuronxcc.nki." + part for part in ("kernels", "nccl", "compiler.backends")),
)
