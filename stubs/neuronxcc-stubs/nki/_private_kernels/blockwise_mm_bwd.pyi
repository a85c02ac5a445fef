"""neuronxcc.nki._private_kernels.blockwise_mm_bwd"""

# Written by stubs/generate.py.
from typing import Any


def __getattr__(name: str) -> Any: ...
