"""``neuronxcc.nki.language.constants``: public kernels import helpers from here."""

# Written by stubs/generate.py.
from typing import Any


def sizeinbytes(dtype: Any) -> Any:
    """The bytes of one element of ``dtype``."""
