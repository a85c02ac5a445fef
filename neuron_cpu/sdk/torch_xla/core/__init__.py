"""Stub of torch_xla.core."""
