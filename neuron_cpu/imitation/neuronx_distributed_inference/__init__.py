"""Stand-in for the part of NeuronX Distributed Inference that Llama models and drivers use.

Interfaces are those of NxDI 0.1.0, or of 0.6 where `NEURON_CPU_NXDI` says so (contract.py). A model
that is written for them runs here and on a device unchanged.
"""
