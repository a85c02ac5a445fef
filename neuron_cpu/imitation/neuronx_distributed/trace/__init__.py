"""Checkpoint sharding, as NxD's tracing code does it."""
