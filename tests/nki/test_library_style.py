"""Kernels in the style of production libraries, against numpy.

Such kernels carry their own allocator of addresses and their own views, choose engines and sizes by
generation, pass tiles from function to function and lists of tiles as buffers. Each runs twice,
replayed and in eager mode; those of two cores are replayed only.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from nki.language import NKIObject

from neuron_cpu.core import NkiWarning
from tests.nki.tiles import sb

# what production kernels do is no occasion for a warning
pytestmark = [
    pytest.mark.filterwarnings("error::neuron_cpu.core.device.errors.NkiWarning"),
    pytest.mark.usefixtures("production"),
]

P = nl.tile_size.pmax


@pytest.fixture(params=["replayed", "eager"])
def execution(request, monkeypatch):
    if request.param == "eager":
        monkeypatch.setenv("NKI_CPU_EAGER", "1")


def data(seed, shape, dtype=np.float32, scale=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(dtype)


def close(found, want, tolerance=1e-4):
    want = np.asarray(want, np.float64)
    assert found.shape == want.shape
    assert np.abs(found.astype(np.float64) - want).max() <= tolerance * np.abs(want).max()


# --- later chips ----------------------------------------------------------------------------------


class Base(NKIObject):
    first: int
    second: int = 2


class Derived(Base):
    third: "a name that nobody defines" = 3  # noqa: F722


def test_fields_are_those_of_the_bases_first():
    made = Derived(1, third=5)
    assert (made.first, made.second, made.third) == (1, 2, 5)
    assert Base(7).second == 2 and Base().first is None
    with pytest.raises(TypeError, match="fields first, second, third"):
        Derived(fourth=1)


@dataclass
class Optional(NKIObject):
    bias: nl.ndarray = None


@nki.jit
def with_options(x, bias=None):
    options = Optional(bias=bias)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    if options and options.bias:
        nisa.tensor_tensor(tile, tile, nl.load(bias), nl.add)
    nl.store(out, tile)
    return out


@pytest.mark.filterwarnings("default::neuron_cpu.core.device.errors.NkiWarning")
def test_an_optional_tensor_is_true():
    x = data(80, (4, 8))
    assert np.array_equal(with_options(x), x)
    with pytest.warns(NkiWarning, match="sim_tensor_truth"):
        assert np.array_equal(with_options(x, 2 * x), 3 * x)


@nki.jit
def root_of_squares(x):
    """The squares go to one element of each row; the sums alone are read."""
    out = nl.ndarray((x.shape[0], 1), nl.float32, buffer=nl.shared_hbm)
    tile, sums, sink = nl.load(x), sb((x.shape[0], 1)), sb((x.shape[0], 1), nl.bfloat16)
    nothing = sink.ap(pattern=[[1, x.shape[0]], [0, x.shape[1]]])
    nisa.activation_reduce(nothing, nl.square, tile, nl.add, sums)
    nl.store(out, sums)
    return out


def test_a_sink_for_what_is_only_summed(execution):
    x = data(81, (16, 32))
    close(root_of_squares(x), (x.astype(np.float64) ** 2).sum(1, keepdims=True))


@dataclass
class Loose(NKIObject):
    """A field without a default behind one with one, and one without annotation."""

    scale: float = 2.0
    weight: nl.ndarray
    rows = 4

    @property
    def has_weight(self):
        return self.weight is not None

    def doubled(self):
        return 2 * self.scale


def test_data_classes_of_the_language():
    assert (Loose().weight, Loose().rows, Loose(3.0).doubled()) == (None, 4, 6.0)
    assert Loose(weight="w", rows=8).rows == 8 and Loose(1.0, "w", 2).rows == 2
    assert Loose(rows=1) == Loose(2.0, None, 1)
    with pytest.raises(TypeError, match="columns"):
        Loose(columns=1)


@nki.jit
def scaled_sum(x, y, factor):
    """`factor` (P, 1) is bf16, which tensor_scalar would refuse."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile, factors = nl.load(x), nl.load(factor)
    nisa.scalar_tensor_tensor(tile, tile, nl.multiply, factors, nl.add, nl.load(y))
    nl.store(out, tile)
    return out


def test_a_narrow_factor(execution):
    x, y, factor = data(82, (8, 16)), data(83, (8, 16)), data(84, (8, 1), "bfloat16")
    close(scaled_sum(x, y, factor), x * factor.astype(np.float64) + y)
