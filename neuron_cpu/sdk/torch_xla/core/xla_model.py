"""The names of torch_xla.core.xla_model that model files mention; there is no XLA device here."""

from __future__ import annotations

import torch

REDUCE_SUM = "sum"
REDUCE_MUL = "mul"
REDUCE_AND = "and"
REDUCE_OR = "or"
REDUCE_MIN = "min"
REDUCE_MAX = "max"


def xla_device() -> torch.device:
    """The device on which the stand-in computes: the CPU."""
    return torch.device("cpu")


def mark_step() -> None:
    """Nothing is pending: the stand-in executes at once."""
