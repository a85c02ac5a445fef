"""Mixtures of experts: a router, and many MLPs. Each token takes a few of the MLPs."""
