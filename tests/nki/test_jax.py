"""Arrays of JAX as arguments of kernels of either language, where JAX is installed."""

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
jax.config.update("jax_num_cpu_devices", 2)  # of a mesh; before JAX is used

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


BOTH = pytest.mark.parametrize("kernel", [doubled, doubled_before], ids=["current", "old"])


@BOTH
def test_kernels_run_in_what_jax_traces(kernel):
    """Under jit, in loops, and with other arguments constants of the program."""
    x = jnp.arange(32, dtype=jnp.float32).reshape(4, 8)

    @jax.jit
    def program(x):
        looped = jax.lax.fori_loop(0, 3, lambda _, v: kernel(v, v) / 2 + 1, x)
        scanned, each = jax.lax.scan(lambda v, y: (kernel(v, v), y + v.sum()), x, jnp.arange(3.0))
        return looped, scanned, each, kernel(np.ones((4, 8), np.float32), x)

    looped, scanned, each, mixed = program(x)
    assert np.allclose(looped, plain(x, kernel, lambda v: v / 2 + 1))
    assert np.allclose(scanned, 8 * x if kernel is doubled else plain(x, kernel, lambda v: v))
    assert each.shape == (3,) and np.allclose(
        mixed, kernel(np.ones((4, 8), np.float32), np.array(x))
    )


def plain(x, kernel, after):
    for _ in range(3):
        x = after(kernel(x, x))
    return x


@BOTH
def test_each_device_of_a_mesh_runs_the_kernel_on_its_part(kernel):
    mesh = jax.make_mesh((2,), ("rows",))
    x = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    part = jax.sharding.PartitionSpec("rows")
    run = jax.shard_map(
        lambda v: kernel(v, v), mesh=mesh, in_specs=part, out_specs=part, check_vma=False
    )
    assert np.allclose(jax.jit(run)(x), kernel(x, x))


@BOTH
def test_gradients_and_batches_are_refused_with_the_way_out(kernel):
    x = jnp.ones((2, 4, 8))
    with pytest.raises(NkiError, match="under jax.custom_vjp.*sim_jax_gradient"):
        jax.grad(lambda v: kernel(v, v).sum())(x[0])
    with pytest.raises(NkiError, match="loop with jax.lax.map.*sim_jax_vmap"):
        jax.vmap(lambda v: kernel(v, v))(x)

    @jax.custom_vjp
    def given(v):
        return kernel(v, v)

    given.defvjp(lambda v: (given(v), None), lambda _, grad: (3 * grad,))
    assert np.allclose(jax.jit(jax.grad(lambda v: given(v).sum()))(x[0]), 3)
    assert np.allclose(jax.lax.map(lambda v: kernel(v, v), x), kernel(x[0], x[0]))


def test_the_older_call_has_outputs_as_parameters():
    from jax_neuronx import nki_call
    from neuronxcc.nki import language as older

    def added(a, b, out, times):
        older.store(out, (older.load(a) + older.load(b)) * times)

    def program(a, b):
        shape = jax.ShapeDtypeStruct(a.shape, a.dtype)
        return nki_call(added, a, b, out_shape=shape, times=2)

    a, b = jnp.ones((4, 8)), jnp.full((4, 8), 2.0)
    for run in (program, jax.jit(program)):
        assert np.allclose(run(a, b), 6)
