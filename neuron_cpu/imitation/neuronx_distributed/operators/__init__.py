"""Operators over tensors that are sharded across the ranks."""
