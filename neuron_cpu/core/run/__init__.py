"""Execution of a Program in PyTorch, merged or one by one, and comparison of runs."""
