"""``nki.meta``: arrays that are known while a kernel is built."""

# Written by stubs/generate.py.
from typing import Any

from . import tensor as tensor

