"""Tensor-parallel state, layers and the collectives between them."""

from . import layers, mappings, parallel_state, random

__all__ = ["layers", "mappings", "parallel_state", "random"]
