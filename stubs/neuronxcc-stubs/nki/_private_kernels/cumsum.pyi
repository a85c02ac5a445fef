"""The kernel with which NxDI 0.3 to 0.8 draw tokens and lay out a prompt's chunks."""

# Written by stubs/generate.py.
from typing import Any

COLUMNS: Any

def cumsum(x_hbm: Any, sums_hbm: Any, axis: Any = 1) -> Any:
    """Running sums along axis 1: x [rows, N] @ HBM -> sums [rows, N] @ HBM, carried in fp32."""
