"""Building large object graphs without the garbage collector in the way."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect nothing inside the block.

    Programs and schedules are millions of small objects without cycles; walking them again and
    again would take half of the time of a schedule and a quarter of that of a trace.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
