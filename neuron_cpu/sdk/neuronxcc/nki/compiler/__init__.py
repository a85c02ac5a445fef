"""``neuronxcc.nki.compiler``: direct allocation, order and compiler decorators."""

from typing import Any

from neuron_cpu.core.device import release
from neuron_cpu.core.language import allocation
from neuron_cpu.core.language.allocation import (
    enable_stack_allocator,
    force_auto_alloc,
    psum,
    sbuf,
    skip_middle_end_transformations,
)

__all__ = [
    "enable_stack_allocator",
    "force_auto_alloc",
    "psum",
    "sbuf",
    "skip_middle_end_transformations",
]


def __getattr__(name: str) -> Any:
    """``no_reorder``, in the releases that have it."""
    if name == "no_reorder" and release.since(release.NO_REORDER):
        return allocation.no_reorder
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
