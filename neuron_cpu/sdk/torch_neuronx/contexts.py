"""Blocks that change what the runtime does."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def disable_nrt_load() -> Iterator[None]:
    """Do nothing: the block keeps models off a device, and none is loaded here."""
    yield
