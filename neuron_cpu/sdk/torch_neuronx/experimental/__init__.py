"""Experiments of torch_neuronx: names only."""
