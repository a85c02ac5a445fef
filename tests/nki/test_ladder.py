"""Whole kernels that use each construct as production kernels do, from a copy to attention.

Every reference is numpy in float64, written without a look at the kernel.
"""

from __future__ import annotations

import ml_dtypes
import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

# what production kernels do is no occasion for a warning
pytestmark = [
    pytest.mark.filterwarnings("error::neuron_cpu.core.device.errors.NkiWarning"),
    pytest.mark.usefixtures("production"),
]

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3)
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


# --- one pass over the data -----------------------------------------------------------------------
@nki.jit
def cumulated(x, columns=100):
    """Running sums along rows, tile after tile of columns; the last column is the next initial."""
    rows, width = x.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    for r in range(0, rows, 128):
        p = min(128, rows - r)
        zero, initial = nl.zeros((p, columns), nl.float32), 0.0
        for c in range(0, width, columns):
            f = min(columns, width - c)
            tile = nl.load(x[r : r + p, c : c + f])
            total = sb((p, f))
            nisa.tensor_tensor_scan(total, tile, zero[:, 0:f], initial, nl.add, nl.add)
            nisa.dma_copy(out[r : r + p, c : c + f], total)
            initial = total[:, f - 1 : f]
    return out


def test_running_sums_over_tiles():
    x = data(1, (150, 230))
    close(cumulated(x), np.cumsum(x.astype(float), axis=1))


@nki.jit
def rotated(x, cos, sin):
    """Rotary embedding in place, halves by an access pattern over (P, heads * d)."""
    tokens, heads, d = x.shape
    tile = sb((tokens, heads, d), x.dtype)
    nisa.dma_copy(tile, x)
    c, s = nl.load(cos), nl.load(sin)
    low = tile.ap([[heads * d, tokens], [d, heads], [1, d // 2]])
    high = tile.ap([[heads * d, tokens], [d, heads], [1, d // 2]], offset=d // 2)
    parts = []
    for _ in range(4):
        parts.append(sb((tokens, heads, d // 2)))
    wide_c = c.expand_dim(1).broadcast(1, heads)
    wide_s = s.expand_dim(1).broadcast(1, heads)
    nisa.tensor_tensor(parts[0], low, wide_c, nl.multiply)
    nisa.tensor_tensor(parts[1], high, wide_s, nl.multiply)
    nisa.tensor_tensor(parts[2], high, wide_c, nl.multiply)
    nisa.tensor_tensor(parts[3], low, wide_s, nl.multiply)
    nisa.tensor_tensor(low, parts[0], parts[1], nl.subtract)
    nisa.tensor_tensor(high, parts[2], parts[3], nl.add)
    nisa.dma_copy(x, tile)
    return x


def test_rotary_embedding_in_place():
    x, angle = data(2, (40, 3, 16)), data(3, (40, 8))
    before = x.astype(float)
    low, high = before[..., :8], before[..., 8:]
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    found = rotated(x, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    close(found, np.concatenate([low * c - high * s, high * c + low * s], -1))
    assert found is x


@nki.jit
def quantised(x, gain):
    """RMSNorm whose rows are scaled to fp8's range; returns rows and scales."""
    rows, width = x.shape
    out = nl.ndarray(x.shape, nl.float8_e4m3, buffer=nl.shared_hbm)
    scales = nl.ndarray((rows, 1), nl.float32, buffer=nl.shared_hbm)
    tile, weight = nl.load(x), sb((rows, width))
    nisa.dma_copy(weight, gain.broadcast(0, rows))
    square, total, scale = sb((rows, width)), sb((rows, 1)), sb((rows, 1))
    nisa.activation(square, nl.square, tile, reduce_op=nl.add, reduce_res=total, reduce_cmd=SUM)
    nisa.tensor_scalar(total, total, nl.multiply, 1.0 / width, op1=nl.add, operand1=1e-6)
    nisa.activation(total, nl.rsqrt, total)
    nisa.scalar_tensor_tensor(tile, tile, nl.multiply, total, nl.multiply, weight)
    nisa.tensor_scalar_reduce(square, tile, nl.abs, 0.0, nl.maximum, scale)
    nisa.tensor_scalar(scale, scale, nl.multiply, 1.0 / 240.0)
    nisa.reciprocal(total, scale)
    short = sb((rows, width), nl.float8_e4m3)
    nisa.tensor_scalar(short, tile, nl.multiply, total)
    nisa.dma_copy(out, short)
    nisa.dma_copy(scales, scale)
    return out, scales


def test_norm_quantised_to_fp8():
    x, gain = data(4, (60, 96)), data(5, (1, 96))
    wide = x.astype(float)
    y = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * gain
    rows, scales = quantised(x, gain)
    close(scales, np.abs(y).max(1, keepdims=True) / 240)
    assert rows.dtype == FP8
    close(rows.astype(float) * scales, y, 2**-4)


@nki.jit
def averaged(x, size):
    """Average pooling of (C, H, W) by one reduction over windows that a pattern reads."""
    channels, height, width = x.shape
    h, w = height // size, width // size
    out = nl.ndarray((channels, h, w), x.dtype, buffer=nl.shared_hbm)
    tile, total = nl.load(x), sb((channels, h, w))
    windows = tile.ap(
        [[height * width, channels], [size * width, h], [size, w], [width, size], [1, size]]
    )
    nisa.tensor_reduce(total, nl.add, windows, axis=(3, 4))
    nisa.tensor_scalar(total, total, nl.multiply, 1.0 / size**2)
    nisa.dma_copy(out, total)
    return out


def test_average_pooling():
    x = data(6, (20, 12, 15))
    want = x.astype(float).reshape(20, 4, 3, 5, 3).mean((2, 4))
    close(averaged(x, 3), want)


# --- rows by data ---------------------------------------------------------------------------------
@nki.jit
def embedded(table, ids):
    """Rows of a table; ids outside of it leave zeros."""
    count, width = ids.shape[0], table.shape[1]
    out = nl.ndarray((count, width), table.dtype, buffer=nl.shared_hbm)
    for start in range(0, count, 128):
        n = min(128, count - start)
        index, rows = sb((n, 1), nl.int32), nl.zeros((n, width), table.dtype)
        nisa.dma_copy(index, ids[start : start + n, :])
        source = table.ap([[width, n], [1, width]], vector_offset=index, indirect_dim=0)
        nisa.dma_copy(rows, source, oob_mode=nisa.oob_mode.skip, dge_mode=nisa.dge_mode.swdge)
        nisa.dma_copy(out[start : start + n, :], rows)
    return out


def test_embedding_with_padding_ids(target):
    target("trn2")  # on gen2 it is open whether rows may be chosen by data
    table = data(7, (50, 24), BF16)
    ids = np.random.default_rng(8).integers(0, 50, (200, 1)).astype(np.int32)
    ids[::7] = 50
    want = np.where(ids < 50, table[np.minimum(ids[:, 0], 49)].astype(float), 0)
    assert np.array_equal(embedded(table, ids).astype(float), want)


@nki.jit
def cross_entropy(logits, labels):
    """-log softmax at the label of each row: the label's logit by comparing column numbers."""
    rows, width = logits.shape
    out = nl.ndarray((rows, 1), nl.float32, buffer=nl.shared_hbm)
    tile, label, number = nl.load(logits), sb((rows, 1)), sb((rows, width))
    nisa.dma_copy(label, labels)
    nisa.iota(number, [[1, width]])
    hit, most, total, picked = sb((rows, width)), sb((rows, 1)), sb((rows, 1)), sb((rows, 1))
    nisa.scalar_tensor_tensor(hit, number, nl.equal, label, nl.multiply, tile)
    nisa.tensor_reduce(picked, nl.add, hit, axis=1)
    nisa.tensor_reduce(most, nl.maximum, tile, axis=1, negate=True)
    nisa.activation(hit, nl.exp, tile, bias=most, reduce_op=nl.add, reduce_res=total,
                    reduce_cmd=SUM)  # fmt: skip
    nisa.activation(total, nl.log, total)
    nisa.tensor_tensor(total, total, most, nl.subtract)
    nisa.tensor_tensor(total, total, picked, nl.subtract)
    nisa.dma_copy(out, total)
    return out


def test_cross_entropy():
    logits = data(9, (70, 90), scale=30.0)
    labels = np.random.default_rng(10).integers(0, 90, (70, 1)).astype(np.int32)
    wide = logits.astype(float)
    most = wide.max(1, keepdims=True)
    norm = np.log(np.exp(wide - most).sum(1, keepdims=True)) + most
    close(cross_entropy(logits, labels), norm - np.take_along_axis(wide, labels.astype(int), 1))


@nki.jit
def largest(x, columns=64):
    """Largest element and its column: the eight of each tile, then the largest of those."""
    rows, width = x.shape
    tiles = width // columns
    out = nl.ndarray((rows, 2), nl.float32, buffer=nl.shared_hbm)
    best, place = sb((rows, tiles)), sb((rows, tiles), nl.uint32)
    for t in range(tiles):
        tile = nl.load(x[:, nl.ds(t * columns, columns)])
        eight, index = sb((rows, 8)), sb((rows, 8), nl.uint32)
        nisa.max8(eight, tile)
        nisa.nc_find_index8(index, tile, eight)
        nisa.tensor_copy(best[:, t : t + 1], eight[:, 0:1])
        nisa.tensor_copy(place[:, t : t + 1], index[:, 0:1])
    most, equal, number = sb((rows, 1)), sb((rows, tiles)), sb((rows, tiles))
    nisa.tensor_reduce(most, nl.maximum, best, axis=1)
    nisa.iota(number, [[columns, tiles]])
    nisa.tensor_tensor(number, number, place, nl.add)
    nisa.tensor_scalar(equal, best, nl.not_equal, most, op1=nl.multiply, operand1=1e9)
    nisa.tensor_tensor(number, number, equal, nl.add)
    both = sb((rows, 2))
    nisa.tensor_copy(both[:, 0:1], most)
    nisa.tensor_reduce(both[:, 1:2], nl.minimum, number, axis=1)
    nisa.dma_copy(out, both)
    return out


def test_largest_of_long_rows():
    x = data(11, (30, 512))
    x[3, 100] = x[3, 400] = 99.0  # the first one counts
    found = largest(x)
    assert np.array_equal(found[:, 1], x.argmax(1)) and np.array_equal(found[:, 0], x.max(1))


# --- products -------------------------------------------------------------------------------------
@nki.jit
def convolved(x, w):
    """Depthwise convolution along time: each tap is a product by a diagonal, summed in PSUM."""
    channels, time = x.shape
    taps = w.shape[1]
    length = time - taps + 1
    out = nl.ndarray((channels, length), nl.float32, buffer=nl.shared_hbm)
    tile, weight = nl.load(x), nl.load(w)
    identity = nl.shared_identity_matrix(channels, dtype=nl.float32)
    acc = ps((channels, length))
    for k in range(taps):
        diagonal = sb((channels, channels))
        nisa.tensor_scalar(diagonal, identity, nl.multiply, weight[:, k : k + 1])
        moving = tile.ap([[time, channels], [1, length]], offset=k)
        nisa.nc_matmul(acc, diagonal, moving, is_stationary_onezero=False)
    result = sb((channels, length))
    nisa.tensor_copy(result, acc)
    nisa.dma_copy(out, result)
    return out


def test_depthwise_convolution():
    x, w = data(12, (40, 90)), data(13, (40, 4))
    want = sum(x[:, k : k + 87].astype(float) * w[:, k : k + 1] for k in range(4))
    close(convolved(x, w), want)


@nki.jit
def projected_in_column_tiles(x, w):
    """Few tokens: two products side by side on TensorE, each on 64 of its columns."""
    k, tokens = x.shape
    width = w.shape[1]
    out = nl.ndarray((tokens, width), nl.float32, buffer=nl.shared_hbm)
    left, right = nl.load(x), nl.load(w)
    half = width // 2
    acc = ps((128, half))
    for c in range(2):
        nisa.nc_matmul(acc[c * 64 : c * 64 + tokens, :], left, right[:, nl.ds(c * half, half)],
                       tile_position=(0, c * 64), tile_size=(128, 64))  # fmt: skip
    for c in range(2):
        part = sb((tokens, half))
        nisa.tensor_copy(part, acc[c * 64 : c * 64 + tokens, :])
        nisa.dma_copy(out[:, nl.ds(c * half, half)], part)
    return out


def test_column_tiles():
    x, w = data(14, (128, 16), BF16), data(15, (128, 600), BF16)
    close(projected_in_column_tiles(x, w), x.T.astype(float) @ w.astype(float))


@nki.jit
def swiglu(x_t, gate, up, down):
    """silu(x gate) * (x up) down with features on partitions: no transposes between products."""
    hidden, tokens = x_t.shape
    inner = gate.shape[1]
    out = nl.ndarray((hidden, tokens), nl.float32, buffer=nl.shared_hbm)
    x, middle = [], []
    for k in range(0, hidden, 128):
        x.append(nl.load(x_t[k : k + 128, :]))
    for c in range(0, inner, 128):
        gated, raised = ps((128, tokens)), ps((128, tokens))
        for k in range(hidden // 128):
            rows = nl.ds(k * 128, 128)
            nisa.nc_matmul(gated, nl.load(gate[rows, nl.ds(c, 128)]), x[k], accumulate=k > 0)
            nisa.nc_matmul(raised, nl.load(up[rows, nl.ds(c, 128)]), x[k], accumulate=k > 0)
        tile, product = sb((128, tokens)), sb((128, tokens), x_t.dtype)
        nisa.activation(tile, nl.silu, gated)
        nisa.tensor_tensor(product, tile, raised, nl.multiply)
        middle.append(product)
    for h in range(0, hidden, 128):
        acc, result = ps((128, tokens)), sb((128, tokens))
        for k in range(inner // 128):
            weight = nl.load(down[nl.ds(k * 128, 128), nl.ds(h, 128)])
            nisa.nc_matmul(acc, weight, middle[k])
        nisa.tensor_copy(result, acc)
        nisa.dma_copy(out[nl.ds(h, 128), :], result)
    return out


def test_swiglu_mlp():
    x = data(16, (256, 20))
    gate, up, down = data(17, (256, 384)), data(18, (256, 384)), data(19, (384, 256))
    g, u = gate.T.astype(float) @ x, up.T.astype(float) @ x
    close(swiglu(x, gate, up, down), down.T.astype(float) @ (g / (1 + np.exp(-g)) * u))


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


# --- cores and ranks ------------------------------------------------------------------------------
@nki.jit
def split_product(x_t, w):
    """Each core contracts half of the rows; they exchange partial sums and store half each."""
    k, tokens = x_t.shape
    width = w.shape[1]
    cores, me = nl.num_programs(), nl.program_id()
    out = nl.ndarray((width, tokens), nl.float32, buffer=nl.shared_hbm)
    acc, own = ps((width, tokens)), sb((width, tokens))
    for r in range(k // cores // 128):
        rows = nl.ds(me * (k // cores) + r * 128, 128)
        nisa.nc_matmul(acc, nl.load(w[rows, :]), nl.load(x_t[rows, :]))
    nisa.tensor_copy(own, acc)
    part = width // cores
    if cores > 1:
        other = sb((width, tokens))
        nisa.sendrecv(own, other, 1 - me, 1 - me, 0)
        nisa.tensor_tensor(own, own, other, nl.add)
    nisa.dma_copy(out[nl.ds(me * part, part), :], own[nl.ds(me * part, part), :])
    return out


@pytest.mark.parametrize("cores", [1, 2])
def test_a_contraction_over_both_cores(target, cores):
    target("trn2")
    x, w = data(28, (512, 30)), data(29, (512, 64))
    close(split_product[cores](x, w), w.T.astype(float) @ x)


def test_collectives_of_one_rank_are_copies(monkeypatch):
    monkeypatch.setenv("NKI_CPU_SILENCE", "sim_exchanged_outside")

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        gathered = nl.ndarray(x.shape, x.dtype, buffer=nl.private_hbm)
        group = ncc.ReplicaGroup([[0]])
        ncc.all_reduce([x], [gathered], group, nl.add)
        ncc.all_gather([gathered], [out], group, 0)
        register = ncc.rank_id()
        assert register.frozen
        return out

    x = data(30, (4, 8))
    assert np.array_equal(kernel(x), x)
