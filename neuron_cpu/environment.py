"""Environment variables that hold inside of a block."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Inside the block the environment variable has this value; behind it, what it had before."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ.update({} if before is None else {name: before})
