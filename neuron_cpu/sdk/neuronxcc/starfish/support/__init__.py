"""Helpers of the compiler package that public kernels import."""
