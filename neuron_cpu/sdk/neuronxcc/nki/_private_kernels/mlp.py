"""Closed MLP kernels (names only)."""

from . import placeholder

mlp_fused_add_isa_kernel = placeholder("mlp_fused_add_isa_kernel")
mlp_isa_kernel = placeholder("mlp_isa_kernel")
quant_mlp_fused_add_isa_kernel = placeholder("quant_mlp_fused_add_isa_kernel")
quant_mlp_isa_kernel = placeholder("quant_mlp_isa_kernel")
