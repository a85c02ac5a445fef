"""Functions of ``nki.language`` against float64 references."""

import math

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch

from tests.nki.tiles import close, data
from tests.warned import allows

pytestmark = allows("sim_expansion", "sim_parser_subset", "sim_power")

BF16 = np.dtype(ml_dtypes.bfloat16)


def run(body, *inputs):
    """What the tile that ``body`` returns holds, for numpy inputs loaded whole."""

    @nki.jit
    def kernel(*hbm):
        made = body(*[nl.load(t) for t in hbm])
        if nl.is_psum(made.buffer):
            made = nl.copy(made)
        out = nl.ndarray(made.shape, made.dtype, buffer=nl.shared_hbm)
        nl.store(out, made)
        return out

    return kernel(*inputs)


BINARY = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide,
    "maximum": np.maximum, "minimum": np.minimum, "power": np.power, "mod": np.mod,
    "fmod": np.fmod, "equal": np.equal, "not_equal": np.not_equal, "less": np.less,
    "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
}  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
def test_binary_functions_of_tiles_and_numbers(name, monkeypatch):
    monkeypatch.setenv("NKI_CPU_SILENCE", "sim_divide,sim_division,sim_modulo")  # refused
    a, b = data(1, (5, 7), low=0.5), data(2, (5, 7), low=0.5)
    function, want = getattr(nl, name), BINARY[name]
    close(run(lambda x, y: function(x, y), a, b), want(a.astype(float), b))
    close(run(lambda x: function(x, 1.5), a), want(a.astype(float), 1.5))
    close(run(lambda x: function(1.5, x), a), want(1.5, a.astype(float)))


BITS = {
    "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor,
    "left_shift": np.left_shift, "right_shift": np.right_shift,
}  # fmt: skip


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_bitwise_functions(name, dtype):
    high = np.iinfo(dtype).max
    a = np.random.default_rng(3).integers(0, high, (4, 6)).astype(dtype)
    b = np.random.default_rng(4).integers(0, 7, (4, 6)).astype(dtype)
    found = run(lambda x, y: getattr(nl, name)(x, y), a, b)
    assert found.dtype == dtype and np.array_equal(found, BITS[name](a, b))
    inverted = run(nl.invert, a)
    assert np.array_equal(inverted, ~a)


SQRT2 = math.sqrt(2.0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / SQRT2))


def slope(function):
    return lambda x: (function(x + 1e-6) - function(x - 1e-6)) / 2e-6


UNARY = {
    "logical_not": np.logical_not, "abs": np.abs, "square": np.square, "exp": np.exp,
    "tanh": np.tanh, "sigmoid": sigmoid, "relu": lambda x: np.maximum(x, 0), "gelu": gelu,
    "gelu_apprx_sigmoid": lambda x: x * sigmoid(1.702 * x),
    "gelu_apprx_tanh": lambda x: 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))),
    "gelu_dx": slope(gelu), "gelu_apprx_sigmoid_dx": slope(lambda x: x * sigmoid(1.702 * x)),
    "silu": lambda x: x * sigmoid(x), "silu_dx": slope(lambda x: x * sigmoid(x)),
    "softplus": lambda x: np.log1p(np.exp(x)), "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "erf": np.vectorize(math.erf), "erf_dx": lambda x: 2 / math.sqrt(math.pi) * np.exp(-(x**2)),
    "sin": np.sin, "cos": np.cos, "copy": lambda x: x, "ceil": np.ceil, "floor": np.floor,
    "trunc": np.trunc, "negative": np.negative, "sign": np.sign,
}  # fmt: skip
POSITIVE = {
    "log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "reciprocal": np.reciprocal,
    "arctan": np.arctan, "tan": np.tan,
}  # fmt: skip


@pytest.mark.parametrize("name", [*UNARY, *POSITIVE])
def test_unary_functions(name):
    positive = name in POSITIVE
    x = data(5, (6, 9), low=0.1 if positive else -3.0, high=1.4 if positive else 3.0)
    if not positive:
        x[0, :4] = [0.0, 2.0, -2.0, 2.5]
    want = (POSITIVE if positive else UNARY)[name](x.astype(float))
    close(run(getattr(nl, name), x), want)


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_angles_are_reduced_first(name):
    x = data(6, (4, 16), low=-60.0, high=60.0)
    close(run(getattr(nl, name), x), getattr(np, name)(x.astype(float)))


def test_rounding_functions_of_large_and_tiny_numbers():
    x = np.array([[8388609.0, -8388611.0, 1e20, 0.4999999, -0.5, 4194304.5]], np.float32)
    for name in ("floor", "ceil", "trunc"):
        assert np.array_equal(run(getattr(nl, name), x), getattr(np, name)(x)), name


REDUCED = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod, "mean": np.mean}


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions(name, keepdims):
    x = data(7, (4, 3, 5))
    found = run(lambda t: getattr(nl, name)(t, (1, 2), keepdims=keepdims), x)
    want = REDUCED[name](x.astype(float), axis=(1, 2), keepdims=keepdims)
    close(found, want if keepdims else want[:, None])
    close(run(lambda t: getattr(nl, name)(t, -1), x), REDUCED[name](x.astype(float), axis=2))


def test_other_reductions():
    x = data(8, (4, 6, 5))
    close(run(lambda t: nl.var(t, (1, 2)), x), x.astype(float).var((1, 2), keepdims=True))
    close(run(lambda t: nl.var(t, 2), x), x.astype(float).var(2, keepdims=True))
    flags = (data(9, (4, 6)) > -2).astype(np.float32)
    close(run(lambda t: nl.all(t, 1), flags), flags.all(1)[:, None])


def test_softmax_and_norm_of_uneven_rows():
    """Rows whose largest elements differ by more than fp32's exponent range."""
    x = data(10, (5, 12))
    x[1] += 200.0
    x[2] -= 1000.0
    powers = np.exp(x.astype(float) - x.max(1, keepdims=True))
    close(run(nl.softmax, x), powers / powers.sum(1, keepdims=True))
    w, y = data(11, (5, 12)), data(12, (5, 12))
    want = y / np.sqrt((y.astype(float) ** 2).sum(1, keepdims=True) / 12 + 1e-6) * w
    close(run(lambda t, u: nl.rms_norm(t, u, 1, 12), y, w), want)


def test_broadcasts_and_gathers():
    x = data(13, (4, 6))
    row = data(16, (1, 6), BF16)
    wide = run(lambda t: nl.copy(nl.broadcast_to(t, (70, 6))), row)
    assert np.array_equal(wide, np.broadcast_to(row, (70, 6)))
    column = data(17, (4, 1))
    assert np.array_equal(
        run(lambda t: nl.copy(nl.broadcast_to(t, (4, 5))), column), np.broadcast_to(column, (4, 5))
    )
    assert run(lambda t: nl.copy(nl.expand_dims(t, 1)), x).shape == (4, 1, 6)
    index = np.random.default_rng(18).integers(0, 6, (4, 3)).astype(np.uint32)
    found = run(nl.gather_flattened, x, index)
    assert np.array_equal(found, np.take_along_axis(x, index.astype(int), 1))


def test_tensor_engine_functions():
    a, b = data(19, (16, 8)), data(20, (16, 12))
    close(run(lambda x, y: nl.matmul(x, y, transpose_x=True), a, b), a.T.astype(float) @ b)
    assert np.array_equal(run(nl.transpose, a), a.T)


def test_creation_in_every_memory():
    @nki.jit
    def kernel(x):
        out = nl.full((300, 4), 2.5, nl.bfloat16, buffer=nl.shared_hbm)
        flat = nl.ones((7,), nl.int32, buffer=nl.shared_hbm)
        moved = nl.ndarray((4, 6), x.dtype, buffer=nl.shared_hbm)
        tile = nl.load_transpose2d(x)
        other = nl.zeros_like(tile)
        nisa.tensor_tensor(other, other, tile, nl.add)
        assert nl.empty_like(x).buffer is x.buffer and nl.is_hbm(x.buffer)
        nl.store(moved, other)
        return out, flat, moved

    x = data(21, (6, 4))
    full, ones, moved = kernel(x)
    assert np.array_equal(full, np.full((300, 4), 2.5, BF16)) and ones.tolist() == [1] * 7
    assert np.array_equal(moved, x.T)


def test_types_are_names_and_limits_follow_the_target(target):
    assert nl.bfloat16 == "bfloat16" and nl.tile_size.pmax == 128

    @nki.jit
    def kernel(x):
        assert x.dtype == nl.bfloat16 and x.buffer is not nl.sbuf and f"{x.dtype}" == "bfloat16"
        assert nl.tile_size.sbuf_fmax_bytes == 245752 and nisa.get_nc_version() >= 4
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm, name="out")
        assert out.name == "out" and out.ndim == 2 and out.size == 8
        nisa.dma_copy(out, x)
        return out

    target("gen4")
    kernel(torch.zeros(2, 4, dtype=torch.bfloat16))
    target("trn1")
    with pytest.raises(AssertionError):
        kernel(torch.zeros(2, 4, dtype=torch.bfloat16))
