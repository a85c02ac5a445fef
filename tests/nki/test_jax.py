"""Arrays of JAX as arguments of kernels of either language, where JAX is installed."""

from __future__ import annotations

import ml_dtypes
import neuronxcc.nki
import neuronxcc.nki.isa as old_isa
import neuronxcc.nki.language as old
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError

jax = pytest.importorskip("jax", reason="JAX is optional and not installed: pip install jax")
jnp = jax.numpy

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "int32", "uint8"]


@nki.jit
def doubled(x, y):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.tensor_tensor(tile, nl.load(x), nl.load(y), nl.add)
    nisa.dma_copy(out, tile)
    return out


@neuronxcc.nki.jit
def doubled_before(x, y):
    out = old.ndarray(x.shape, dtype=x.dtype, buffer=old.shared_hbm)
    old.store(out, old_isa.tensor_tensor(old.load(x), old.load(y), np.add, dtype=x.dtype))
    return out


@pytest.mark.parametrize("kernel", [doubled, doubled_before], ids=["current", "old"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_come_and_go_as_jax_s(kernel, dtype):
    values = np.arange(32).reshape(4, 8) % 7
    x = jnp.asarray(values).astype(dtype)
    found = kernel(x, x)
    assert isinstance(found, jax.Array) and found.dtype == x.dtype
    assert np.array_equal(np.asarray(found).astype(np.float32), 2.0 * values)
    mixed = kernel(x, np.asarray(x))  # beside numpy's
    assert isinstance(mixed, jax.Array) and bool((mixed == found).all())


def test_a_kernel_that_writes_its_input_leaves_jax_s_array_alone(monkeypatch):
    @nki.jit
    def kernel(x):
        tile = nl.load(x)
        nisa.tensor_scalar(tile, tile, nl.multiply, 3.0)
        nisa.dma_copy(x, tile)
        return x

    x = jnp.ones((4, 8))
    for eager in ("0", "1"):
        monkeypatch.setenv("NKI_CPU_EAGER", eager)
        found = kernel(x)
        assert isinstance(found, jax.Array) and bool((found == 3).all()) and bool((x == 1).all())


def test_types_of_jax_are_types_of_kernels():
    """Converted since NKI 0.4; numpy's own are refused."""

    @nki.jit
    def kernel(x, dtype):
        out = nl.ndarray(x.shape, dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, nl.load(x, dtype))
        return out

    assert kernel(jnp.ones((2, 3)), jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(NkiError, match="sim_dtype"):
        kernel(jnp.ones((2, 3)), np.dtype(ml_dtypes.bfloat16))
    with pytest.raises(TypeError, match="int4"):
        kernel(jnp.ones((2, 3)).astype(jnp.int4), jnp.bfloat16)


@pytest.mark.parametrize("kernel", [doubled, doubled_before], ids=["current", "old"])
@pytest.mark.parametrize("change", ["jit", "grad", "vmap"])
def test_traced_arrays_have_no_values(kernel, change):
    def function(x):
        found = kernel(x, x)
        return found.sum() if change == "grad" else found

    x = jnp.ones((2, 4, 8) if change == "vmap" else (4, 8))
    with pytest.raises(NkiError, match="sim_jax_tracer"):
        getattr(jax, change)(function)(x)
