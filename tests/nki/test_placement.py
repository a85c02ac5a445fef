"""Addresses that a kernel gives, and PSUM tensors of several banks."""

from __future__ import annotations

import nki
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError

X = np.random.default_rng(1).normal(size=(128, 512)).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "buffer", "address"),
    [((64, 4), nl.sbuf, (32, 0)), ((4, 4), nl.sbuf, (0, 180224)), ((4, 4), nl.psum, (0, 512)),
     ((4, 4), nl.shared_hbm, (0, 0))],
)  # fmt: skip
def test_wrong_addresses(shape, buffer, address):
    @nki.jit
    def kernel(x):
        nl.ndarray(shape, nl.float32, buffer=buffer, address=address)

    with pytest.raises(NkiError, match="sim_allocation_address"):
        kernel(X)
