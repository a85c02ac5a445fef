"""NxD's weight quantisation: types, checkpoints, quantised parallel layers, conversion.

NxDI reaches int8 and fp8 (e4m3) weights through it, with one scale a tensor or a channel. Source:
aws-neuron/neuronx-distributed, src/neuronx_distributed/quantization.
"""
