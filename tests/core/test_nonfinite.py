"""The instruction that a NaN or an infinity in a kernel's results goes back to."""

from __future__ import annotations

from typing import Any

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
import pytest
import torch

from neuron_cpu.core.run.nonfinite import origin


@nki.jit
def softmax_without_maximum(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    x_sb = nl.load(x_hbm)
    weights_sb = nisa.activation(nl.exp, x_sb)  # overflows
    total_sb = nl.sum(weights_sb, axis=1, keepdims=True)
    nl.store(out_hbm, nl.divide(weights_sb, total_sb))  # inf / inf
    return out_hbm


@nki.jit
def masked_softmax(x_hbm):
    """Rows of a lower triangle: what is masked is -inf, and 0 in the result."""
    rows, columns = x_hbm.shape
    out_hbm = nl.ndarray(x_hbm.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    x_sb = nl.ndarray(x_hbm.shape, dtype=nl.float32, buffer=nl.sbuf)
    x_sb[...] = nl.full(x_hbm.shape, -np.inf, dtype=nl.float32)
    row, column = nl.mgrid[0:rows, 0:columns]
    x_sb[row, column] = nl.load(x_hbm[row, column], mask=column <= row)
    out_sb = nl.softmax(x_sb, axis=1)
    nl.store(out_hbm, out_sb)
    return out_hbm


@nki.jit
def difference_of_masks(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    mask_sb = nl.full(x_hbm.shape, -np.inf, dtype=nl.float32)
    masked_sb = nl.add(nl.load(x_hbm), mask_sb)
    other_sb = nl.copy(mask_sb)
    nl.store(out_hbm, nl.subtract(masked_sb, other_sb))  # -inf + inf
    return out_hbm


@nki.jit
def one_of_two_products(x_hbm):
    """The second product into a bank of PSUM overflows; the first one is finite."""
    out_hbm = nl.ndarray(x_hbm.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    x_sb = nl.load(x_hbm)
    total_psum = nl.zeros(x_hbm.shape, dtype=nl.float32, buffer=nl.psum)
    total_psum += nisa.nc_matmul(x_sb, x_sb)
    large_sb = nl.multiply(x_sb, 3e38)  # overflows
    total_psum += nisa.nc_matmul(x_sb, large_sb)
    nl.store(out_hbm, nl.copy(total_psum))
    return out_hbm


def line_of(kernel: Any, comment: str) -> int:
    code = kernel.function.__code__
    with open(code.co_filename) as file:
        lines = file.read().splitlines()
    found = [n for n, line in enumerate(lines, 1) if n > code.co_firstlineno and comment in line]
    return found[0]


@pytest.mark.parametrize(
    ("kernel", "comment"),
    [
        (softmax_without_maximum, "# overflows"),
        (difference_of_masks, "# -inf + inf"),
        (one_of_two_products, "# overflows"),
    ],
)
def test_the_line_that_made_it_is_named(kernel: Any, comment: str) -> None:
    x = torch.full((32, 32), 200.0)
    program = kernel.trace(x)
    assert not kernel(x).isfinite().all()
    found = origin(program, [x])
    assert found is not None and found.source is not None
    assert found.source.line == line_of(kernel, comment)


def test_an_element_names_its_own_origin() -> None:
    """Only one row overflows: the others' instructions are the same, and none is blamed for it."""
    x = torch.zeros(32, 32)
    assert origin(softmax_without_maximum.trace(x), [x]) is None
    x[7, 3] = 200.0
    found = origin(softmax_without_maximum.trace(x), [x])
    assert found is not None and found.op.name == "activation"


def test_masks_are_on_purpose() -> None:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    assert masked_softmax(x).isfinite().all()
    assert origin(masked_softmax.trace(x), [x]) is None


def test_what_came_in_is_nobodys() -> None:
    x = torch.full((32, 32), float("nan"))
    assert origin(softmax_without_maximum.trace(x), [x]) is None


def test_the_inputs_stay_as_they_are() -> None:
    x = torch.full((32, 32), 200.0)
    origin(softmax_without_maximum.trace(x), [x])
    assert (x == 200.0).all()
