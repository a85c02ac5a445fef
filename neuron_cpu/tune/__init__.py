"""Searching the declared parameters of a kernel by the estimate."""
