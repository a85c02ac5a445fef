"""Blocks in which the runtime does something else than usual."""

from contextlib import contextmanager
from typing import Iterator


@contextmanager
def disable_nrt_load() -> Iterator[None]:
    """Inside the block nothing is loaded to the device; here nothing ever is."""
    yield
