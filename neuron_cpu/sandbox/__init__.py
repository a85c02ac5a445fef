"""Processes of strangers' code: their start, limits and end."""
