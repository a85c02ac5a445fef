"""Names of NxD's weight quantisation; the layers refuse to be built (see quantization_layers)."""
