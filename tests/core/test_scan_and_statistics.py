"""nisa.tensor_tensor_scan, bn_stats and bn_aggr against plain float64 loops."""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError


def run_scan(a, b, initial, op0, op1, **options):
    @nki.jit
    def kernel(a, b, initial):
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        first = initial if isinstance(initial, float) else nl.load(initial)
        found = nisa.tensor_tensor_scan(nl.load(a), nl.load(b), first, op0, op1, **options)
        nl.store(out, value=found)
        return out

    return kernel(a, b, initial)


OPS = {nl.multiply: np.multiply, nl.add: np.add, nl.subtract: np.subtract, nl.maximum: np.maximum}


@pytest.mark.parametrize("reverse", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("ops", [(nl.multiply, nl.add), (nl.subtract, nl.maximum)])
@pytest.mark.parametrize("vector", [False, True])
def test_scan_carries_the_previous_result(ops, reverse, vector):
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 7, 33)).astype(np.float32) * 0.9
    initial = rng.standard_normal((7, 1)).astype(np.float32) if vector else 0.25
    found = run_scan(a, b, initial, *ops, reverse0=reverse[0], reverse1=reverse[1])
    state = np.broadcast_to(np.asarray(initial, np.float64), (7, 1))[:, 0]
    for i in range(33):
        step = OPS[ops[0]](*((state, a[:, i]) if reverse[0] else (a[:, i], state)))
        state = OPS[ops[1]](*((b[:, i], step) if reverse[1] else (step, b[:, i])))
        np.testing.assert_allclose(found[:, i], state, rtol=1e-4, atol=1e-5)


def test_scan_refuses_bitwise_operators():
    a = np.zeros((4, 8), np.float32)
    with pytest.raises(NkiError, match="bitwise_and"):
        run_scan(a, a, 0.0, nl.bitwise_and, nl.add)


@pytest.mark.parametrize("columns", [1, 2, 7, 512, 1000, 1337])
def test_statistics_of_pieces_aggregate_to_mean_and_variance(columns):
    @nki.jit
    def kernel(x):
        out = nl.ndarray((x.shape[0], 2), dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.load(x)
        pieces = -(-columns // 512)
        parts = nl.ndarray((x.shape[0], 6 * pieces), dtype=nl.float32)
        for k in nl.static_range(pieces):
            width = min(512, columns - 512 * k)
            parts[:, 6 * k : 6 * k + 6] = nisa.bn_stats(tile[:, 512 * k : 512 * k + width])
        nl.store(out, value=nisa.bn_aggr(parts))
        return out

    x = (np.random.default_rng(0).standard_normal((50, columns)) * 5 + 100).astype(np.float32)
    found = kernel(x)
    np.testing.assert_allclose(found[:, 0], x.astype(np.float64).mean(1), rtol=1e-6)
    np.testing.assert_allclose(found[:, 1], x.astype(np.float64).var(1), rtol=1e-4, atol=1e-6)


def test_statistics_keep_even_and_odd_positions_apart():
    @nki.jit
    def kernel(x):
        out = nl.ndarray((x.shape[0], 6), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, value=nisa.bn_stats(nl.load(x)))
        return out

    found = kernel(np.array([[1, 10, 3, 20, 5]], np.float32))
    np.testing.assert_allclose(found, [[3, 3, 8, 2, 15, 50]])


@pytest.mark.parametrize(
    ("function", "columns", "message"),
    [(nisa.bn_stats, 513, "513"), (nisa.bn_aggr, 8, "expected a multiple of 3")],
)
def test_statistics_refuse_sizes(function, columns, message):
    @nki.jit
    def kernel(x):
        out = nl.ndarray((x.shape[0], 6), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, value=function(nl.load(x)))
        return out

    with pytest.raises(NkiError, match=message):
        kernel(np.zeros((4, columns), np.float32))
