"""neuronxcc.nki._pre_prod_kernels.ring_attention"""

# Written by stubs/generate.py.
from typing import Any


def __getattr__(name: str) -> Any: ...
