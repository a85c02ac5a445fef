"""Weight quantisation of NxD: types, checkpoints, quantised parallel layers, conversion.

Facts: aws-neuron/neuronx-distributed, src/neuronx_distributed/quantization; the features that NxDI
reaches through it are int8 and fp8 (e4m3) weights, per tensor and per channel.
"""
