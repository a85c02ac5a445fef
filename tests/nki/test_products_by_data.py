"""Products whose operands lie at run-time offsets, against NumPy."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError
from tests.crossed import crossed

pytestmark = pytest.mark.filterwarnings("ignore::neuron_cpu.core.device.errors.NkiWarning")


@pytest.fixture(autouse=True)
def on_trn2(target):
    target("trn2")  # whose engines take operands at run-time offsets


R = np.random.default_rng(0)
A = R.normal(size=(64, 96)).astype(np.float32)
B = R.normal(size=(64, 160)).astype(np.float32)


def register_of(tile):
    made = nisa.register_alloc()
    nisa.register_load(made, tile)
    return made


@nki.jit
def one(a, b, at, form, side):
    """A product of 32 stationary and 64 moving columns, one or both of them placed by data."""
    out = nl.ndarray((32, 64), nl.float32, buffer=nl.shared_hbm)
    left, right, first = nl.load(a), nl.load(b), nl.load(at)
    start = register_of(first) if form == "register" else first
    if form == "ap":
        x = left.ap([[96, 64], [1, 32]], scalar_offset=start, indirect_dim=1)
        y = right.ap([[160, 64], [1, 64]], scalar_offset=start, indirect_dim=1)
    else:
        x, y = left[:, nl.ds(start, 32)], right[:, nl.ds(start, 64)]
    product = nl.ndarray((32, 64), nl.float32, buffer=nl.psum)
    left_side = x if side != "moving" else left[:, 0:32]
    right_side = y if side != "stationary" else right[:, 0:64]
    nisa.nc_matmul(product, left_side, right_side)
    nl.store(out, nl.copy(product))
    return out


@pytest.mark.parametrize(
    ("form", "side", "at", "eager"),
    crossed(
        ["register", "tile", "ap"], ["stationary", "moving", "both"], [0, 5, 64], [False, True]
    ),
)
def test_operands_placed_by_data(form, side, at, eager, monkeypatch):
    if eager:
        monkeypatch.setenv("NKI_CPU_EAGER", "1")
    x = A[:, at : at + 32] if side != "moving" else A[:, :32]
    y = B[:, at : at + 64] if side != "stationary" else B[:, :64]
    found = one(A, B, np.array([[at]], np.int32), form, side)
    assert np.allclose(found, x.astype(np.float64).T @ y, rtol=1e-5, atol=1e-5)


def test_offsets_out_of_bounds_are_refused():
    with pytest.raises(NkiError, match="err_tensor_access_out_of_bound|outside|bound"):
        one(A, B, np.array([[65]], np.int32), "tile", "stationary")


def into(flag):
    @nki.jit
    def kernel(a, b, at):
        """Two products into one half of PSUM that data choose; the other is filled with ones."""
        out = nl.ndarray((32, 128), nl.float32, buffer=nl.shared_hbm)
        left, right, first = nl.load(a), nl.load(b), nl.load(at)
        sums = nl.ndarray((32, 128), nl.float32, buffer=nl.psum)
        nisa.memset(sums, 1.0)
        half = sums[:, nl.ds(first, 64)]
        nisa.nc_matmul(half, left[:, 0:32], right[:, 0:64], accumulate=flag and False)
        nisa.nc_matmul(half, left[:, 32:64], right[:, 64:128], accumulate=True)
        nl.store(out, nl.copy(sums))
        return out

    return kernel


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("at", [0, 64, 17])
def test_results_placed_by_data(at, eager, monkeypatch):
    if eager:
        monkeypatch.setenv("NKI_CPU_EAGER", "1")
    want = np.ones((32, 128))
    a, b = A.astype(np.float64), B.astype(np.float64)
    want[:, at : at + 64] = a[:, :32].T @ b[:, :64] + a[:, 32:64].T @ b[:, 64:128]
    found = into(True)(A, B, np.array([[at]], np.int32))
    assert np.allclose(found, want, rtol=1e-5, atol=1e-5)


def test_results_placed_by_data_say_whether_they_accumulate():
    with pytest.raises(NkiError, match="accumulate left open"):
        into(None)(A, B, np.array([[0]], np.int32))
