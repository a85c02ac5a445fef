"""Closed attention kernels (names only)."""

from . import placeholder

attention_isa_kernel = placeholder("attention_isa_kernel")
