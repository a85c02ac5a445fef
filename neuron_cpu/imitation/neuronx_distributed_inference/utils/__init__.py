"""Helpers around models: generation, accuracy, benchmarks."""
