"""Validation helpers of torch_neuronx."""
