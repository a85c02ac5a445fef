"""Closed QKV kernels (names only)."""

from . import placeholder

rmsnorm_qkv_isa_kernel = placeholder("rmsnorm_qkv_isa_kernel")
rmsnorm_qkv_isa_fused_add_kernel = placeholder("rmsnorm_qkv_isa_fused_add_kernel")
