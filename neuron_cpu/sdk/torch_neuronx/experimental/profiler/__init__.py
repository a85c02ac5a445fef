"""The profiler of torch_neuronx: names only."""
