"""Tiles that kernels of these tests make, numbers for them, and how far results may be off."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


def sb(shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def ps(shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def ones(shape, dtype=nl.float32):
    """A tile of ones in SBUF."""
    made = sb(shape, dtype)
    nisa.memset(made, 1)
    return made


def beside(body):
    """A kernel that does something beside the copy of its argument that it returns."""

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        body(x)
        nisa.dma_copy(out, x)
        return out

    return kernel


def data(seed, shape, dtype=np.float32, low=-3.0, high=3.0):
    return np.random.default_rng(seed).uniform(low, high, shape).astype(dtype)


def close(found, want, tolerance=1e-5):
    """Shapes alike, and no element off by more than a share of the largest, or of 1."""
    found, want = np.asarray(found, np.float64), np.asarray(want, np.float64)
    assert found.shape == want.shape
    assert np.abs(found - want).max() <= tolerance * max(1.0, np.abs(want).max())
