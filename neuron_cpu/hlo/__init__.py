"""Runs HLO modules that `torch_neuronx.pyhlo` wrote, for aws-neuron/transformers-neuronx.

`calls` says what each custom call of the vendor computes, `execute` hands the module to XLA's
compiler for CPUs (jaxlib, requirements-hlo.txt), `memory` has the runtime's tensors and classes,
`record` lists what a module does, for an estimate of its time (harness/figures/saved.py).
"""
