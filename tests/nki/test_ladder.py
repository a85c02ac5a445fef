"""Attention as production kernels write it: prefill and decode.

Every reference is numpy in float64, written without a look at the kernel.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

# what production kernels do is no occasion for a warning
pytestmark = [
    pytest.mark.filterwarnings("error::neuron_cpu.core.device.errors.NkiWarning"),
    pytest.mark.usefixtures("production"),
]

SUM = nisa.reduce_cmd.reset_reduce


def data(seed, shape, dtype=np.float32, scale=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(dtype)


def close(found, want, tolerance=1e-4):
    want = np.asarray(want, np.float64)
    assert found.shape == want.shape
    assert np.abs(found.astype(np.float64) - want).max() <= tolerance * np.abs(want).max()


def sb(shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def ps(shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


# --- attention ------------------------------------------------------------------------------------
@nki.jit
def flash_attention(q_t, k_t, v, scale):
    """Causal attention of one head, (d, S) queries and keys, (S, d) values, in tiles of 128.

    The running maximum and sum of each query are corrected tile by tile (Dao et al. 2022); tiles
    above the diagonal are not computed.
    """
    d, length = q_t.shape
    out = nl.ndarray((length, d), nl.float32, buffer=nl.shared_hbm)
    identity = nl.shared_identity_matrix(128, dtype=nl.float32)
    for i in range(0, length, 128):
        n = min(128, length - i)
        q = nl.load(q_t[:, nl.ds(i, n)])
        most, total = nl.full((n, 1), 1e30, nl.float32), nl.zeros((n, 1), nl.float32)
        result = nl.zeros((n, d), nl.float32)
        for j in range(0, i + n, 128):
            m = min(128, length - j)
            tile = scores(q, nl.load(k_t[:, nl.ds(j, m)]), scale, i - j)
            most, factor = raised_maximum(most, tile)
            powers, row, turned = sb((n, m)), sb((n, 1)), ps((m, n))
            nisa.activation(powers, nl.exp, tile, bias=most, reduce_op=nl.add, reduce_res=row,
                            reduce_cmd=SUM)  # fmt: skip
            nisa.scalar_tensor_tensor(total, total, nl.multiply, factor, nl.add, row)
            nisa.nc_matmul(turned, powers, identity[0:n, 0:n], is_transpose=True)
            weights, added = sb((m, n)), ps((n, d))
            nisa.tensor_copy(weights, turned)
            nisa.nc_matmul(added, weights, nl.load(v[nl.ds(j, m), :]))
            nisa.scalar_tensor_tensor(result, result, nl.multiply, factor, nl.add, added)
        nisa.reciprocal(total, total)
        nisa.tensor_scalar(result, result, nl.multiply, total)
        nisa.dma_copy(out[nl.ds(i, n), :], result)
    return out


def scores(q, k, scale, distance):
    """Scaled scores [n, m], those of later keys replaced by -1e30."""
    n, m = q.shape[1], k.shape[1]
    product, tile = ps((n, m)), sb((n, m))
    nisa.nc_matmul(product, q, k)
    nisa.tensor_scalar(tile, product, nl.multiply, scale)
    if distance < m - 1:
        masked = sb((n, m))
        nisa.affine_select(masked, [[-1, m]], 1, tile, -1e30, nl.greater_equal, distance)
        tile = masked
    return tile


def raised_maximum(negated, tile):
    """The negated running maximum with ``tile`` seen, and the factor for what was summed before."""
    n = tile.shape[0]
    new, factor = sb((n, 1)), sb((n, 1))
    nisa.tensor_reduce(new, nl.maximum, tile, axis=1, negate=True)
    nisa.tensor_tensor(new, new, negated, nl.minimum)
    # exp(old maximum - new maximum); both are negated
    nisa.tensor_tensor(factor, new, negated, nl.subtract)
    nisa.activation(factor, nl.exp, factor)
    return new, factor


def attention(q, k, v, scale):
    s = (q @ k.T) * scale
    s = np.where(np.tri(*s.shape, k=s.shape[1] - s.shape[0]) > 0, s, -np.inf)
    p = np.exp(s - s.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ v


@pytest.mark.parametrize("generation", ["trn1", "trn2"])
def test_flash_attention_with_uneven_maxima(target, generation):
    target(generation)
    q, k, v = (data(s, (200, 64)) for s in (20, 21, 22))
    k[150] *= 20.0  # a key of a later tile that dominates
    found = flash_attention(np.ascontiguousarray(q.T), np.ascontiguousarray(k.T), v, 0.125)
    close(found, attention(*(a.astype(float) for a in (q, k, v)), 0.125))


@nki.jit
def decoded(q, cache_k, cache_v, new_k, new_v, position, scale):
    """One token's attention: keys (d, S) and values (S, d) of the cache, updated in place.

    The position is data: the row is written at a run-time offset, later columns are masked by it.
    """
    heads, d = q.shape
    length = cache_v.shape[0]
    out = nl.ndarray((heads, d), nl.float32, buffer=nl.shared_hbm)
    at, number = sb((1, 1), nl.int32), sb((heads, length))
    nisa.dma_copy(at, position)
    nisa.dma_copy(cache_v.select(0, at), new_v.select(0, 0))
    nisa.dma_copy(cache_k[:, nl.ds(at, 1)], new_k)
    queries = sb((d, heads))
    nisa.dma_copy(queries, q.permute((1, 0)))
    product, tile = ps((heads, length)), sb((heads, length))
    nisa.nc_matmul(product, queries, nl.load(cache_k))
    limit = sb((heads, 1))
    nisa.dma_copy(limit, position.broadcast(0, heads))
    nisa.iota(number, [[1, length]])
    later = sb((heads, length))
    nisa.tensor_scalar(later, number, nl.greater, limit, op1=nl.multiply, operand1=-1e30)
    nisa.scalar_tensor_tensor(tile, product, nl.multiply, scale, nl.add, later)
    powers = nl.softmax(tile)
    turned, weights, acc = ps((length, heads)), sb((length, heads)), ps((heads, d))
    nisa.nc_transpose(turned, powers)
    nisa.tensor_copy(weights, turned)
    nisa.nc_matmul(acc, weights, nl.load(cache_v))
    result = sb((heads, d))
    nisa.tensor_copy(result, acc)
    nisa.dma_copy(out, result)
    return out, cache_k, cache_v


@pytest.mark.parametrize("position", [0, 17, 95])
def test_decode_attention_writes_its_cache(position):
    q, k, v = data(23, (4, 32)), data(24, (96, 32)), data(25, (96, 32))
    new_k, new_v = data(26, (32, 1)), data(27, (1, 32))
    cache_k, cache_v = np.ascontiguousarray(k.T), v.copy()
    at = np.array([[position]], np.int32)
    found, keys, values = decoded(q, cache_k, cache_v, new_k, new_v, at, 0.2)
    k[position], v[position] = new_k[:, 0], new_v[0]
    assert np.array_equal(cache_k, k.T) and np.array_equal(cache_v, v)
    assert keys is cache_k and values is cache_v
    seen = position + 1
    s = q.astype(float) @ k[:seen].T * 0.2
    p = np.exp(s - s.max(1, keepdims=True))
    close(found, p / p.sum(1, keepdims=True) @ v[:seen])
