"""Messages of torch_neuronx."""
