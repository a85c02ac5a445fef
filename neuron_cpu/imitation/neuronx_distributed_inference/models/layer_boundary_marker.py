"""Marks that tell the compiler where a layer begins and ends; here they change nothing."""

from typing import Any

from torch import nn


class ModuleMarkerStartWrapper(nn.Module):
    """In front of a layer: hands on what it is given."""

    def forward(self, *args: Any) -> Any:
        return args[0] if len(args) == 1 else args


class ModuleMarkerEndWrapper(ModuleMarkerStartWrapper):
    """Behind a layer."""
