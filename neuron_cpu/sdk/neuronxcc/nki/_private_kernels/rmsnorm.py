"""Closed norm kernels (names only)."""

from . import placeholder

rmsnorm_quant_isa_kernel = placeholder("rmsnorm_quant_isa_kernel")
