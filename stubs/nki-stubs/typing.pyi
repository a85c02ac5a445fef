"""``nki.typing``: shapes of parameters, as ``nt.tensor[128, 512]``."""

# Written by stubs/generate.py.
from typing import Any

def __getattr__(name: str) -> Any: ...
