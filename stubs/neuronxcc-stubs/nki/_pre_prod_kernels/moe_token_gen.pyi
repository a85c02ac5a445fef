"""neuronxcc.nki._pre_prod_kernels.moe_token_gen"""

# Written by stubs/generate.py.
from typing import Any


def __getattr__(name: str) -> Any: ...
