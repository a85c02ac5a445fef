"""`jax_neuronx`: JAX itself computes on the host; `nki_call` is the older way to call a kernel.

SDK 2.23 ended its support; programs written before call it (AWS Neuron documentation, release notes
of JAX NeuronX).
"""

import jax  # noqa: F401 - kernels find it loaded

from neuron_cpu.core.language.in_jax import nki_call

__all__ = ["nki_call"]
