"""Addresses that a kernel gives, and PSUM tensors of several banks."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError, NkiWarning
from neuron_cpu.core.time.schedule import schedule

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


def wide(count, kept):
    """Products into ``count`` PSUM tensors of four banks each; ``kept`` are live at once."""

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tile, total = nl.load(x), nl.zeros((128, 512), nl.float32)
        live = []
        for _ in range(count):
            acc = nl.ndarray((128, 2048), nl.float32, buffer=nl.psum)
            for k in range(4):
                nisa.nc_matmul(acc[:, k * 512 : k * 512 + 512], tile[:, 0:128], tile)
            live.append(acc)
            if len(live) == kept:
                for acc in live:
                    nisa.tensor_tensor(total, total, acc[:, 512:1024], nl.add)
                live = []
        nl.store(out, total)
        return out

    return kernel


def test_more_than_psum_holds_can_still_be_timed():
    with pytest.warns(NkiWarning, match="need 12 banks"):
        program = wide(3, 3).trace(X)
    assert schedule(program).total > 0
