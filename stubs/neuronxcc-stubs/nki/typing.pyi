"""``neuronxcc.nki.typing``: annotations of kernel tensors."""

# Written by stubs/generate.py.
from typing import Any

def __getattr__(name: str) -> Any: ...
