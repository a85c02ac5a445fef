"""Tensor-parallel state, layers and the collectives between them."""
