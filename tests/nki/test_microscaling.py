"""Microscaled types: quantisation and products, against an independent reading of the format."""

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError

BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES = {
    "float8_e4m3fn_x4": (ml_dtypes.float8_e4m3fn, 8),
    "float8_e5m2_x4": (ml_dtypes.float8_e5m2, 15),
}


@pytest.fixture(autouse=True)
def trn3(target):
    target("trn3")


def data(seed, shape, scale=1.0):
    random = np.random.default_rng(seed)
    return (random.normal(size=shape) * np.exp(random.normal(size=shape)) * scale).astype(BF16)


def quantised(x, kind):
    """Values of a tensor [P, F] once it is quantised in groups of 8 partitions and 4 columns."""
    narrow, largest = TYPES[kind]
    wide = x.astype(np.float64)
    out = np.zeros_like(wide)
    for p in range(0, x.shape[0], 8):
        for f in range(0, x.shape[1], 4):
            group = wide[p : p + 8, f : f + 4]
            most = np.abs(group).max()
            if most:
                scale = 2.0 ** (np.floor(np.log2(most)) - (largest - 1))
                out[p : p + 8, f : f + 4] = (group / scale).astype(narrow).astype(float) * scale
    return out


def sb(shape, dtype):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def packed(x, kind):
    """An HBM tensor as packed elements and their scales."""
    rows, width = x.shape
    elements = sb((rows, width // 4), kind)
    scales = sb((rows if rows > 32 else rows // 8, width // 4), nl.float8_e8m0fnu)
    nisa.quantize_mx(elements, nl.load(x), scales)
    return elements, scales


@nki.jit
def product(a, b, kind, repeats, other):
    left, right = packed(a, kind), packed(b, other)
    out = nl.ndarray((a.shape[1] // 4, b.shape[1] // 4), nl.float32, buffer=nl.shared_hbm)
    acc = nl.ndarray(out.shape, nl.float32, buffer=nl.psum)
    for _ in range(repeats):
        nisa.nc_matmul_mx(acc, left[0], right[0], left[1], right[1])
    kept = sb(out.shape, nl.float32)
    nisa.tensor_copy(kept, acc)
    nisa.dma_copy(out, kept)
    return out


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("rows", "repeats"), [(32, 1), (128, 2)])
def test_products_of_quantised_operands(kind, rows, repeats):
    """Column m of a packed operand holds 4 values a partition: the contraction is over both.

    The moving operand has the other type.
    """
    other = next(name for name in TYPES if name != kind)
    a, b = data(1, (rows, 4 * 10)), data(2, (rows, 4 * 24))
    a[:8, :4] = 0  # a group without a largest element
    left, right = (quantised(t, k).reshape(rows, -1, 4) for t, k in ((a, kind), (b, other)))
    want = repeats * np.einsum("pmv,pnv->mn", left, right)
    found = product(a, b, kind, repeats, other)
    assert np.abs(found - want).max() <= 1e-5 * np.abs(want).max()
    assert product.trace(a, b, kind, repeats, other).macs == repeats * rows * 4 * 10 * 24


@pytest.mark.parametrize(
    "body",
    [
        lambda x: packed(x[0:16, :], "float8_e4m3fn_x4"),
        lambda x: nisa.quantize_mx(sb((32, 4), nl.float8_e4m3), nl.load(x), sb((4, 4), nl.uint8)),
        lambda x: nisa.quantize_mx(
            sb((32, 2), nl.float8_e4m3fn_x4), nl.load(x[:, 0:8]), sb((2, 2), nl.uint8)
        ),
        lambda x: nisa.quantize_mx(
            sb((64, 2), nl.float8_e4m3fn_x4), nl.load(x[:, 0:8]), sb((36, 2), nl.uint8)
        ),
        lambda x: nisa.nc_matmul_mx(
            nl.ndarray((8, 8), nl.float32, buffer=nl.psum),
            *[nl.load(x[:, 0:8])] * 2,
            *[sb((4, 8), nl.uint8)] * 2,
        ),
    ],
)
def test_wrong_operands(body):
    @nki.jit
    def kernel(x):
        body(x)

    with pytest.raises(NkiError, match="sim_microscaled"):
        kernel(np.zeros((32, 16), BF16))


def test_scales_of_undefined_data_are_undefined():
    @nki.jit
    def kernel(x):
        scales, out = sb((4, 4), nl.uint8), nl.ndarray((4, 4), nl.uint8, buffer=nl.shared_hbm)
        nisa.quantize_mx(sb((32, 4), nl.float8_e4m3fn_x4), sb((32, 16), nl.bfloat16), scales)
        nl.store(out, scales)
        return out

    with pytest.raises(NkiError, match="sim_undefined_data"):
        kernel(np.zeros((32, 16), BF16))


@pytest.mark.parametrize("kind", [*TYPES, "float4_e2m1fn_x4"])
def test_packed_arrays_of_the_host(kind):
    """Records of numpy that nl's name makes, in and out, and as operands of a product."""
    width = np.uint16 if kind == "float4_e2m1fn_x4" else np.uint32
    assert np.zeros((2, 3), dtype=getattr(nl, kind)).dtype.itemsize == np.dtype(width).itemsize

    @nki.jit
    def kernel(a, b, scale):
        kept = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
        out = nl.ndarray((a.shape[1], b.shape[1]), nl.float32, buffer=nl.shared_hbm)
        left, right, scales = sb(a.shape, a.dtype), sb(b.shape, b.dtype), sb((4, 6), nl.uint8)
        for tile, hbm in ((left, a), (right, b), (scales, scale)):
            nisa.dma_copy(tile, hbm)
        acc = nl.ndarray(out.shape, nl.float32, buffer=nl.psum)
        nisa.nc_matmul_mx(acc, left, right, scales, scales)
        nl.store(out, nl.copy(acc))
        nisa.dma_copy(kept, left)
        return kept, out

    random = np.random.default_rng(5)
    if width is np.uint16:
        a, b = (random.integers(0, 1 << 16, (32, 6)).astype(width).view(kind) for _ in range(2))
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        wide = [values[(t.view(width)[..., None] >> np.arange(0, 16, 4)) & 15] for t in (a, b)]
    else:
        narrow = TYPES[kind][0]
        wide = [random.normal(size=(32, 6, 4)).astype(narrow) for _ in range(2)]
        a, b = (t.reshape(32, 24).view(kind) for t in wide)
        assert np.array_equal(a[kind].view(np.uint8), wide[0].view(np.uint8))
    scale = random.integers(120, 135, (4, 6)).astype(np.uint8)
    factor = 2.0 ** (np.repeat(scale, 8, axis=0)[..., None].astype(float) - 127)
    left, right = (t.astype(np.float64) * factor for t in wide)
    kept, found = kernel(a, b, scale)
    assert kept.dtype == a.dtype and np.array_equal(kept.view(width), a.view(width))
    want = np.einsum("pmv,pnv->mn", left, right)
    assert np.abs(found - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(("release", "factor"), [("2.30", 1), ("2.31", 2)])
def test_scales_have_doubled(monkeypatch, release, factor):
    monkeypatch.setenv("NEURON_CPU_NKI", release)

    @nki.jit
    def kernel(x):
        out = nl.ndarray((4, 1), nl.uint8, buffer=nl.shared_hbm)
        nisa.dma_copy(out, packed(x, "float8_e4m3fn_x4")[1].view(nl.uint8))
        return out

    found = kernel(np.full((32, 4), 256.0, BF16))
    assert (2.0 ** (found.astype(float) - 127) == factor).all()


def test_rows_beside_the_scales_are_zeros():
    """But for those that something else has written, as other scales of the same tile."""

    @nki.jit
    def kernel(x):
        out = nl.ndarray((128, 16), nl.uint8, buffer=nl.shared_hbm)
        elements, scales = sb((128, 8), "float8_e4m3fn_x4"), sb((128, 16), nl.uint8)
        nisa.memset(scales[32:36, 8:16], 7)
        for k in range(2):
            part = slice(8 * k, 8 * k + 8)
            nisa.quantize_mx(elements, nl.load(x[:, 32 * k : 32 * k + 32]), scales[:, part])
        nisa.dma_copy(out, scales)
        return out

    found = kernel(np.full((128, 64), 256.0, BF16))
    used = np.arange(128) % 32 < 4
    assert (found[used] == 128).all() and (found[~used] == 0).all()
