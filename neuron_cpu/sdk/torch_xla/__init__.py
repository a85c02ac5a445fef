"""Stub of torch_xla: contest model files import it, nothing of it computes here."""

from __future__ import annotations

import torch

from .core import xla_model

__all__ = ["device", "sync"]


def device() -> torch.device:
    """The device on which the stand-in computes: the CPU."""
    return xla_model.xla_device()


def sync(wait: bool = False) -> None:
    """Nothing is pending: the stand-in executes at once (the later name of `mark_step`)."""
    del wait
