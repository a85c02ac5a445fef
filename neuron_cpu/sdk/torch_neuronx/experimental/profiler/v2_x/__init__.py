"""Version 2 of torch_neuronx: names only."""
