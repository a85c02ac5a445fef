"""neuronxcc.nki.kernels.attention"""

# Written by stubs/generate.py.
from typing import Any


def __getattr__(name: str) -> Any: ...
