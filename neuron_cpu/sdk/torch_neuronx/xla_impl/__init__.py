"""Operators of torch_neuronx."""
