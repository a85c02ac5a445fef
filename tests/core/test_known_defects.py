"""Shapes in sources of `neuronxcc.nki` that compilers got wrong or refuse, and near misses."""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError
from neuron_cpu.core.device.errors import NkiWarning


@nki.jit
def staged(x):
    """aws-neuron-sdk 1045: the last iteration alone was right."""
    out = nl.ndarray((4, 128, 2, 8), x.dtype, buffer=nl.shared_hbm)
    stage = nl.ndarray((128, 2, 8), x.dtype, buffer=nl.sbuf)
    turned = nl.ndarray((4, nl.par_dim(128), 2, 8), x.dtype, buffer=nl.sbuf)
    for k in nl.sequential_range(4):
        stage[...] = nl.load(x[k])
        for j in nl.affine_range(2):
            turned[k, :, j, :] = nl.copy(stage[:, j, :])
        nl.store(out[k], turned[k])
    return out


@nki.jit
def bound_in_the_loop(x):
    """Its thread's workaround."""
    out = nl.ndarray((4, 128, 2, 8), x.dtype, buffer=nl.shared_hbm)
    turned = nl.ndarray((4, nl.par_dim(128), 2, 8), x.dtype, buffer=nl.sbuf)
    for k in nl.sequential_range(4):
        stage = nl.load(x[k])
        for j in nl.affine_range(2):
            turned[k, :, j, :] = nl.copy(stage[:, j, :])
        nl.store(out[k], turned[k])
    return out


@nki.jit
def moved(x):
    """aws-neuron-sdk 1051: a reshape splits a free axis and moves blocks."""
    out = nl.ndarray((4, 128, 16), x.dtype, buffer=nl.shared_hbm)
    tiles = nl.ndarray((4, nl.par_dim(128), 16), x.dtype, buffer=nl.sbuf)
    for k in nl.sequential_range(4):
        tiles[k] = nl.load(x[k])
    tiles = tiles.reshape((4, nl.par_dim(128), 2, 8))
    for k in nl.sequential_range(4):
        nl.store(out[k], tiles[k].reshape((128, 16)))
    return out


@nki.jit
def sliced(x):
    """aws-neuron-sdk 1255: functions on a slice of a reshaped tile."""
    out = nl.ndarray((128, 16), x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x[0])
    turned = tile.reshape((128, 1, 16))
    nl.store(out, nisa.activation(nl.exp, turned[:, 0, :]))
    return out


@nki.jit
def bubbles(x):
    """aws-neuron-sdk 1117: parts of rows of two free axes."""
    out = nl.ndarray((128, 3, 4), x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x[0, :, 0:3, 1:5]))
    return out


@nki.jit
def index_behind_its_loop(x):
    """aws-neuron-sdk 1000: an instruction outside of a loop uses the loop's index."""
    out = nl.ndarray((4, 128, 16), x.dtype, buffer=nl.shared_hbm)
    for k in nl.affine_range(4):
        nl.store(out[k], nl.load(x[k]))
    nl.store(out[k], nl.load(x[k]))
    return out


PARTS = np.arange(4 * 128 * 16, dtype=np.float32).reshape(4, 128, 2, 8)
ROWS = PARTS.reshape(4, 128, 16)


@pytest.mark.parametrize(
    ("kernel", "x", "release", "told"),
    [(staged, PARTS, "2.21", "1045.*sim_staged_tile"),
     (moved, ROWS, "2.21", "1051.*sim_moved_blocks"),
     (sliced, ROWS, "2.26", "1255.*sim_sliced_reshape")],
)  # fmt: skip
def test_known_defects_warn_with_their_issue(kernel, x, release, told, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_SDK", release)
    with pytest.warns(NkiWarning, match=told):
        kernel.trace(x)


def test_the_workaround_is_no_defect():
    bound_in_the_loop.trace(PARTS)


@pytest.mark.parametrize(
    ("kernel", "x", "told"),
    [(bubbles, np.zeros((2, 128, 4, 8), np.float32), "1117.*sim_bubbles"),
     (index_behind_its_loop, ROWS, "F134.*sim_loop_index_used_after")],
)  # fmt: skip
def test_what_a_compiler_refused_is_refused(kernel, x, told):
    with pytest.raises(NkiError, match=told):
        kernel.trace(x)


def test_a_later_release_takes_parts_of_rows(monkeypatch):
    monkeypatch.setenv("NEURON_CPU_SDK", "2.22")
    x = np.arange(2 * 128 * 4 * 8, dtype=np.float32).reshape(2, 128, 4, 8)
    assert np.array_equal(bubbles(x), x[0, :, 0:3, 1:5])
