"""Helpers of the compiler's package that public kernels import."""
