"""``neuronxcc.nki.compiler``: direct allocation and compiler decorators."""

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
