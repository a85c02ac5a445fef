"""Protobuf messages of torch_neuronx."""
