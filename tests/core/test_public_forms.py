"""Call forms of public NKI kernels, each in a kernel of this project's own, against numpy.

A comment before each test names the form and a public file that shows it; files without another
repository are those of aws-neuron/nki-samples, for SDK 2.21 to 2.23. Every test runs twice:
replayed, as programs run, and in eager mode.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from neuronxcc import nki
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl
from neuronxcc.nki import typing as nt

from neuron_cpu.core import NkiError, silence
from neuron_cpu.core.device.errors import NkiWarning
from tests.core.test_refusals import kernel_of

# block axes and in-place operators are what public kernels use; both are warnings
pytestmark = pytest.mark.filterwarnings("ignore::neuron_cpu.core.device.errors.NkiWarning")


@pytest.fixture(autouse=True, params=["replayed", "eager"])
def execution(request, monkeypatch):
    if request.param == "eager":
        monkeypatch.setenv("NKI_CPU_EAGER", "1")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def whole(*shape, seed=0):
    """Small whole numbers: exact in every float type."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def agree(got, expected, tolerance=1e-5):
    assert tuple(got.shape) == np.shape(expected)
    error = np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64)).max()
    assert error <= tolerance * max(1.0, np.abs(expected).max())


# --- names and decorators -------------------------------------------------------------------------
# names from inner modules; contributed/neuron-team-kernels/conv.py, flash_paged_attn_varlen
def test_names_of_inner_modules():
    from neuronxcc.nki.isa.constants import dge_mode, oob_mode, reduce_cmd
    from neuronxcc.nki.language.constants import sizeinbytes
    from neuronxcc.starfish.support.dtype import bfloat16

    assert (dge_mode, oob_mode) == (nisa.dge_mode, nisa.oob_mode)
    assert reduce_cmd is nisa.reduce_cmd and bfloat16 == nl.bfloat16
    assert [sizeinbytes(t) for t in (nl.float32, nl.bfloat16, nl.float8_e4m3)] == [4, 2, 1]


@nki.jit
def doubled_on_a_grid(x):
    """[g, p, f] -> 2 x, one instance for each of the first axis."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out[nl.program_id(0)], nl.load(x[nl.program_id(0)]) * 2)
    return out


# shapes and types in place of tensors; public benchmark scripts for SDK 2.21 to 2.23
@pytest.mark.parametrize("dtype", [nl.float32, nl.bfloat16, nl.float8_e4m3, nl.int32])
def test_benchmark_of_shapes(dtype, capsys):
    seen = []

    def kernel(x, factor, scale=None):
        seen.append((x.shape, x.dtype, factor, scale.shape))
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    timed = nki.benchmark(warmup=2, iters=10)(kernel)
    timed(nt.tensor[[100, 7], dtype], 3, scale=nt.tensor[(5,), dtype])
    assert timed.benchmark_result.nc_latency.get_latency_percentile(99) > 0
    assert seen == [((100, 7), dtype, 3, (5,))]


# nki.baremetal of a kernel that is decorated already; the run scripts of the samples do so
def test_decorating_twice_keeps_the_grid():
    x = normal(3, 4, 5)
    agree(nki.baremetal(doubled_on_a_grid, save_neff_name="file.neff")[3](x), 2 * x)
    agree(nki.jit(doubled_on_a_grid[3], mode="simulation")(x), 2 * x)


# the older decorator without parentheses; Stable Diffusion samples of aws-neuron-samples
def test_nki_jit_of_torch_neuronx():
    pytest.importorskip("torch.utils._pytree")  # without PyTorch there is no such package
    from torch_neuronx import nki_jit

    @nki_jit
    def kernel(x, out):
        nl.store(out[nl.program_id(0)], nl.load(x[nl.program_id(0)]) * 2.0)

    x, out = torch.randn(2, 4, 5), torch.zeros(2, 4, 5)
    kernel[2](x, out)
    assert torch.equal(out, 2 * x)


# rows of indices broadcast over partitions; block tables of paged attention in vLLM
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int16, np.int8, np.uint8])
def test_integer_rows_broadcast_exactly(dtype):
    kernel = kernel_of(lambda x: nl.load(x).broadcast_to((16, 600)))
    bounds = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(bounds.min, bounds.max, (1, 600), dtype, endpoint=True)
    x[0, :2] = bounds.min, bounds.max
    np.testing.assert_array_equal(kernel(x), np.broadcast_to(x, (16, 600)))


# configurations that the caller changes between calls; src/nki_samples/reference/attention.py
def test_changed_configuration_traces_again():
    @dataclasses.dataclass
    class Config:
        factor: float

    @nki.jit
    def kernel(x, config=None):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x) * config.factor)
        return out

    x, config = normal(4, 5), Config(2.0)
    agree(kernel(x, config), 2 * x)
    config.factor = 3.0
    agree(kernel(x, config=config), 3 * x)
    agree(kernel(x, config), 3 * x)


# return of a reshaped output; contributed/interpolate_bilinear_fwd.py
def test_reshaped_output():
    @nki.jit
    def kernel(x, part):
        out = nl.ndarray([4, 6], x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out[0:2] if part else out.reshape(shape=(2, 2, 6))

    x = normal(4, 6)
    agree(kernel(x, False), x.reshape(2, 2, 6))
    agree(kernel(torch.from_numpy(x), False), x.reshape(2, 2, 6))
    assert kernel(torch.empty(4, 6, device="meta"), False).shape == (2, 2, 6)
    with pytest.raises(NkiError, match="sim_partial_output"):
        kernel(x, True)


# --- subscripts -----------------------------------------------------------------------------------
# the first axis of another mgrid as a column index; src/nki_samples/tutorials/layernorm
def test_first_axis_of_another_grid_indexes_columns():
    @nki.jit
    def kernel(x):
        rows, n = x.shape
        out = nl.ndarray((rows, 2), x.dtype, buffer=nl.shared_hbm)
        i_p, i_f, _ = nl.mgrid[0:rows, 0:n, 0:1]
        tile = nl.load(x[i_p, i_f])
        i_bn, i_stats = nl.mgrid[0 : nl.tile_size.bn_stats_fmax, 0:6]
        pieces = math.ceil(n / nl.tile_size.bn_stats_fmax)
        stats = nl.ndarray((rows, 6 * pieces), np.float32)
        for j in nl.affine_range(pieces):
            i_column = j * nl.tile_size.bn_stats_fmax + i_bn
            stats[i_p, j * 6 + i_stats] = nisa.bn_stats(
                tile[i_p, i_column], mask=(i_column < n), dtype=np.float32
            )
        found = nisa.bn_aggr(stats[i_p, nl.arange(6 * pieces)[None, :]])
        root = nl.sqrt(found[i_p, 1])
        nl.store(out[:, 0:1], found[i_p, 0])
        nl.store(out[:, 1:2], root)
        return out

    x = normal(100, 700)
    agree(kernel(x), np.stack([x.mean(1), x.std(1)], axis=1), 1e-4)


def test_grids_that_do_not_meet_are_refused():
    @nki.jit
    def kernel(x):
        i_p = nl.mgrid[0:8, 0:4].p
        both = nl.mgrid[0:6, 0:4].p + nl.mgrid[0:6, 0:4].x
        return nl.load(x[i_p, both])

    with pytest.raises(NkiError, match=r"\(8, 1\), \(6, 4\) in one subscript.*sim_index_shape"):
        kernel(normal(8, 20))


# --- instructions and functions -------------------------------------------------------------------
# transposes that go straight into a product; src/.../reference/attention.py, contributed/fft1d.py
def test_transposes_as_operands_of_products():
    def body(a, b):
        left, right = nisa.nc_transpose(nl.load(a)), nisa.nc_transpose(nl.load(b))
        return nisa.nc_matmul(left, moving=right[:, 0 : b.shape[0]])

    a, b = whole(100, 64), whole(50, 64, seed=1)
    with pytest.warns(NkiWarning, match=r"TensorE reads SBUF only.*\[sim_transposed_operand\]"):
        agree(kernel_of(body)(a, b), a @ b.T)


# masked transposes keep what the destination held; attention_token_gen.py
@pytest.mark.parametrize("rows", [20, 40])
def test_masked_transpose_keeps_the_rest(rows):
    def body(x):
        tile, turned = nl.ndarray((rows, 128), x.dtype), nl.full((128, rows), 7, x.dtype)
        tile[:, 0 : x.shape[1]] = nl.load(x)
        i_p, i_f = nl.arange(rows)[:, None], nl.arange(128)[None, :]
        i_q, i_r = nl.arange(128)[:, None], nl.arange(rows)[None, :]
        turned[i_q, i_r] = nl.transpose(tile[i_p, i_f], mask=(i_f < x.shape[1]))
        turned[i_q, i_r] = nl.transpose(tile[i_p, i_f], mask=(rows < 0))
        return turned

    x = normal(rows, 100)
    agree(kernel_of(body)(x), np.concatenate([x.T, np.full((28, rows), 7.0)]))


# results in nl.hbm, as vector kernels of a university course have them: each instance's own
def test_results_in_private_memory_are_told_and_of_a_grid_refused():
    @nki.jit
    def kernel(x):
        out = nl.ndarray(shape=x.shape, dtype=x.dtype, buffer=nl.hbm)
        nl.store(out[nl.program_id(0)], nl.load(x[nl.program_id(0)]))
        return out

    with pytest.raises(NkiError, match="buffer=nl.shared_hbm.*err_unsupported_memory"):
        kernel[2](normal(2, 4, 5))
    with pytest.warns(NkiWarning, match="sim_private_result"):
        agree(kernel[1](normal(1, 4, 5)), normal(1, 4, 5))


# an operand under a condition on loop variables alone
def test_conditions_on_loop_variables_select_all_or_nothing():
    @nki.jit
    def kernel(x):
        out = nl.ndarray((4, 128, 8), nl.float32, buffer=nl.shared_hbm)
        for i in nl.affine_range(4):
            tile = nl.zeros((128, 8), nl.float32, buffer=nl.sbuf)
            tile[i < 2] = nl.load(x)
            p, f = nl.arange(128)[:, None], nl.arange(8)[None, :]
            nl.store(out[i, p, f, i != 1], tile[i != 1])
            nl.store(out[i, p, f, i == 1], nl.multiply(tile, 3.0))
        return out

    x = np.arange(1, 1025, dtype=np.float32).reshape(128, 8)
    assert np.array_equal(kernel(x), np.stack([x, 3 * x, 0 * x, 0 * x]))


# rows out of bounds skipped, where no row is chosen by data: an autotuner's conv1d; where data
# choose them, a load into a buffer: NxD Inference's chunked prefill
@pytest.mark.parametrize("loads", [False, True])
def test_skipping_rows_out_of_bounds_needs_rows_chosen_by_data_and_a_newer_core(loads, monkeypatch):
    def body(x, rows):
        tile = nl.zeros((64, 32), nl.float32, buffer=nl.sbuf)
        p, f = nl.arange(64)[:, None], nl.arange(32)[None, :]
        source = x[p if rows is None else nl.load(rows), f]
        if loads:
            tile[p, f] = nl.load(source, mode=nisa.oob_mode.skip)
        else:
            nisa.dma_copy(dst=tile[p, f], src=source, oob_mode=nisa.oob_mode.skip)
        return tile

    x = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    rows = np.where(np.arange(64) % 3, np.arange(64)[::-1], 9000).astype(np.int32)[:, None]
    assert np.array_equal(kernel_of(body)(x, None), x)
    with pytest.raises(NkiError, match="sim_newer_core"):
        kernel_of(body)(x, rows)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert np.array_equal(kernel_of(body)(x, rows), np.where(rows < 64, x[rows[:, 0] % 64], 0))


# a number that a tile holds beside slices: NxD Inference's kernel of chunked prefill
def test_slices_beside_a_number_that_data_choose_give_an_axis_each():
    @nki.jit
    def kernel(x, which):
        out = nl.ndarray((16, 3), x.dtype, buffer=nl.shared_hbm)
        number = nl.load(which)[0, 0]
        nl.store(out, nl.load(x[4:20, number, nl.ds(2, 3)]))
        return out

    x = np.arange(20 * 5 * 6, dtype=np.float32).reshape(20, 5, 6)
    assert np.array_equal(kernel(x, np.array([[3]], np.int32)), x[4:20, 3, 2:5])
    with pytest.raises(NkiError, match="expected 0 to 4"):
        kernel(x, np.array([[5]], np.int32))


# (P, 1) beside (P, n) in tensor_tensor; AWS's double_row_matmul.py, course convolutions with
# published utilisation
@pytest.mark.parametrize("shape", [(5, 1), (5, 1, 3), (5, 4, 1)])
@pytest.mark.parametrize("first", [True, False])
def test_size_one_axes_are_stretched_with_a_warning(shape, first):
    def body(x, y):
        wide, narrow = nl.load(x), nl.load(y)
        operands = (wide, narrow) if first else (narrow, wide)
        return nisa.tensor_tensor(*operands, op=nl.subtract)

    x, y = normal(5, 4, 3), normal(*shape, seed=1)
    with pytest.warns(NkiWarning, match="expected equal shapes.*sim_stretched_operand"):
        got = kernel_of(body)(x, y)
    y = y.reshape(5, 1, 1) if len(shape) == 2 else y
    agree(got, x - y if first else y - x)


# masks that leave several boxes, each a transfer or a reduction of its own
@pytest.mark.parametrize("form", ["load", "max"])
def test_what_a_mask_of_several_boxes_leaves_out_keeps_its_content(form):
    def body(x, before):
        i, j = nl.arange(4)[:, None], nl.arange(5)[None, :]
        tile = nl.ndarray((4, 5), x.dtype)
        tile[...] = nl.load(before)
        corner = (i + j <= 4) & (j < 4)
        if form == "load":
            tile[i, j] = nl.load(x[i, j], mask=corner)
        else:
            a, b, c = nl.arange(4)[:, None, None], nl.arange(5)[None, :, None], nl.arange(2)
            pairs = nl.load(x)[a, b + 0 * c[None, None, :]]
            tile[...] = nl.max(pairs, axis=[2], mask=(a + b <= 4) & (b < 4))
        return tile

    x, before = normal(4, 4), normal(4, 5, seed=1)
    i, j = np.mgrid[0:4, 0:5]
    want = np.where((i + j <= 4) & (j < 4), np.pad(x, ((0, 0), (0, 1))), before)
    with silence("sim_start_partition", "sim_reduce_mask_parts"):
        agree(kernel_of(body)(x, before), want)
