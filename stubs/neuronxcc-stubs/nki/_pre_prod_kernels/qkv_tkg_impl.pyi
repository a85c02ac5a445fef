"""neuronxcc.nki._pre_prod_kernels.qkv_tkg_impl"""

# Written by stubs/generate.py.
from typing import Any


def __getattr__(name: str) -> Any: ...
