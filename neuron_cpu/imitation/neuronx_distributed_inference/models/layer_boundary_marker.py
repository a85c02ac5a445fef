"""Marks at which the compiler sees a layer begin and end; here they change nothing."""

from typing import Any

from torch import nn


class ModuleMarkerStartWrapper(nn.Module):
    """The mark before a layer; it returns its inputs."""

    def forward(self, *args: Any) -> Any:
        return args[0] if len(args) == 1 else args


class ModuleMarkerEndWrapper(ModuleMarkerStartWrapper):
    """The mark after a layer; it returns its inputs."""
