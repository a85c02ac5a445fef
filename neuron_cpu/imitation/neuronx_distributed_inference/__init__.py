"""Stand-in for the subset of NeuronX Distributed Inference that Llama models and drivers use.

The interfaces are those of NxDI 0.1.0; `NEURON_CPU_NXDI=0.1 ... 0.6` chooses another version's
(see contract.py). A model written against them runs here and on the device unchanged.
"""
