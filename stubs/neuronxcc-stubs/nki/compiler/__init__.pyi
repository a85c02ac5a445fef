"""``neuronxcc.nki.compiler``: direct allocation, order and compiler decorators."""

# Written by stubs/generate.py.
from typing import Any

psum: Any
sbuf: Any

def enable_stack_allocator(func: Any = None, log_level: Any = 50) -> Any:
    """Decorator of the device compiler's allocator; nothing to choose here."""
def force_auto_alloc(func: Any = None) -> Any:
    """Decorator: ignore explicit addresses, for comparison with automatic allocation."""
def no_reorder() -> Any:
    """``with ncc.no_reorder():`` keeps the compiler from moving instructions.

    Its documentation (v2.26.1, nki.compiler: a guard that prevents the reordering of operations)
    leaves open how far it reaches; the time model issues the whole kernel as it is written."""
def skip_middle_end_transformations(func: Any = None) -> Any:
    """Decorator of the device compiler's pipeline; nothing to skip here."""
