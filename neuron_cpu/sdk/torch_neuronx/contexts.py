"""Blocks that change what the runtime does."""

from contextlib import contextmanager
from typing import Iterator


@contextmanager
def disable_nrt_load() -> Iterator[None]:
    """Do nothing: the block keeps models off a device, and none is loaded here."""
    yield
