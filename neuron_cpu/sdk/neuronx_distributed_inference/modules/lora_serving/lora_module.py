"""Recognising low-rank adapter modules; the stand-in wraps none."""

from __future__ import annotations

from torch import nn


class MultiLoraModule(nn.Module):
    """Base of adapter layers, for isinstance checks."""


def is_lora_module(module: nn.Module) -> bool:
    """Whether `module` is an adapter layer and so takes `adapter_ids`."""
    return isinstance(module, MultiLoraModule)
