"""neuronxcc.nki._pre_prod_kernels.output_proj"""

# Written by stubs/generate.py.
from typing import Any


def __getattr__(name: str) -> Any: ...
