"""Seeding."""

import random

import numpy
import torch


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's and PyTorch's generators."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
