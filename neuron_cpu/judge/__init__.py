"""Is a kernel legal, correct and fast? Judged against a reference function, or another kernel."""

from .asserting import assert_kernel

__all__ = ["assert_kernel"]
