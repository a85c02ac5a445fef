"""The one private name that NxDI 0.1 model files import."""

# Written by stubs/generate.py.
from typing import Any


def vnc(cores: Any) -> Any:
    """Cores per logical core, as a kernel grid dimension; here simply their number."""
