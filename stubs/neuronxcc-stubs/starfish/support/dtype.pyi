"""``neuronxcc.starfish.support.dtype``: the numpy type of bf16 arrays."""

# Written by stubs/generate.py.
from typing import Any

bfloat16: Any

