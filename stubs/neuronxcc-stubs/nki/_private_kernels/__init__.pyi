"""The SDK's closed kernels. A kernel runs if it has a file here; any other refuses a call."""

# Written by stubs/generate.py.
from typing import Any


def __getattr__(name: str) -> Any: ...
