"""Mixtures of experts: a router, and MLPs of which each token takes a few."""
