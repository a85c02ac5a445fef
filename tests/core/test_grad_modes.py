"""One kernel called in and outside of torch.inference_mode(), with and without gradients."""

from __future__ import annotations

from collections.abc import Callable

import neuronxcc.nki.typing as nt
import numpy as np
import pytest
import torch
from neuronxcc import nki
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

MODES: dict[str, Callable] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
}


def product(x, w, cache: nt.mutable_tensor):
    """Sums over K in PSUM, times a constant: plan buffers, a constant, scratch and a cache."""
    out = nl.ndarray((128, 64), nl.bfloat16, buffer=nl.shared_hbm)
    identity_sb = nl.load(nl.shared_constant(np.eye(128, dtype=np.float32)))
    sum_psum = nl.zeros((128, 64), nl.float32, buffer=nl.psum)
    for k in nl.affine_range(2):
        rows = nl.ds(128 * k, 128)
        sum_psum += nisa.nc_matmul(nl.load(x[rows]), nl.load(w[rows]))
    same_psum = nisa.nc_matmul(identity_sb, nl.copy(sum_psum))
    result_sb = nl.copy(same_psum, dtype=nl.bfloat16)
    nl.store(out, result_sb)
    nl.store(cache, result_sb)
    return out, cache


# Every pair of calls; inputs of every mode meet each mode of the first call and of the second.
ROWS = [
    (first, second, [*MODES][(i + j) % 3], (i + j) % 2 == 1)
    for i, first in enumerate(MODES)
    for j, second in enumerate(MODES)
]


@pytest.mark.parametrize(("first", "second", "made", "eager"), ROWS)
def test_a_kernel_runs_in_one_mode_and_then_in_another(first, second, made, eager):
    """Inputs come from ``made``; results may be changed in place afterwards, in either mode."""
    kernel = nki.jit(product, eager=eager)
    generator = torch.Generator().manual_seed(1)
    with MODES[made]():
        x = torch.randn(256, 128, generator=generator).bfloat16()
        w = torch.randn(256, 64, generator=generator).bfloat16()
        cache = torch.zeros(128, 64, dtype=torch.bfloat16)
    if made == "grad":
        w.requires_grad_(True)
    expected = (x.float().T @ w.detach().float()).bfloat16()
    for mode in (first, second):
        with MODES[mode]():
            out, same = kernel(x, w, cache)
            assert same is cache and out.requires_grad == (mode == made == "grad")
            torch.testing.assert_close(out, expected, rtol=2**-7, atol=0.1)
            assert torch.equal(cache, out)
            out.add_(1)
    out.add_(1)
    if out.requires_grad:
        with pytest.raises(RuntimeError, match="kernel product has no gradient.*no_grad"):
            out.sum().backward()
