"""What public compilers refuse is refused on their chips and releases, and near misses are not."""

import neuronxcc
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch

from neuron_cpu.core import NkiError
from neuron_cpu.core.device import refusals
from neuron_cpu.core.device.errors import NkiWarning
from tests.nki.tiles import beside

X = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
BF16 = nl.bfloat16


def sb(shape=(64, 32), dtype=nl.float32, **more):
    made = nl.ndarray(shape, dtype, buffer=nl.sbuf, **more)
    nisa.memset(made, 1)
    return made


def ps(shape=(64, 32), dtype=nl.float32):
    return nl.ndarray(shape, dtype, buffer=nl.psum)


def placed(x, axis=1):
    at = sb((1, 1), nl.int32)
    return nl.load(x).ap([[32, 64], [1, 4]], scalar_offset=at, indirect_dim=axis)


def looped(body):
    for i in nl.dynamic_range(2):
        body(i)


def nested(x):
    looped(lambda i: looped(lambda j: nisa.memset(sb(), 0)))


def skipping(x, inside):
    def move(i):
        rows = sb((32, 1), nl.int32)
        source = x.ap([[32, 32], [1, 4]], vector_offset=rows, indirect_dim=0)
        nisa.dma_copy(sb((32, 4)), source, oob_mode=nisa.oob_mode.skip)

    if inside:
        looped(move)
    else:
        move(0)


def summed(dtype=nl.float32):
    nisa.tensor_scalar_reduce(sb(), sb(), nl.add, 0.0, nl.add, sb((64, 1), dtype))


def conjunction(dtype):
    nisa.tensor_tensor(sb(dtype=dtype), sb(dtype=nl.int32), sb(dtype=nl.int32), nl.bitwise_and)


def scratch(x, memory):
    made_hbm = nl.ndarray(x.shape, x.dtype, buffer=memory)
    nisa.dma_copy(made_hbm, x)
    nisa.dma_copy(sb(), made_hbm)


def zeros():
    return nl.zeros((64, 32), nl.float32, buffer=nl.psum)


# check: chip, release, a kernel's body that it refuses, and the nearest legal one
REFUSED = {
    "sim_divide": ("trn2", "2.32", lambda x: nl.divide(sb(), sb()),
                   lambda x: nl.multiply(sb(), nl.reciprocal(sb()))),
    "sim_unknown_operator": (
        "trn2", "2.32", lambda x: nisa.tensor_scalar(sb(), sb(), op0=nl.divide, operand0=2.0),
        lambda x: nisa.tensor_scalar(sb(), sb(), op0=nl.multiply, operand0=0.5)),
    "sim_modulo": (
        "trn2", "2.32", lambda x: nisa.tensor_scalar(sb(), sb(), op0=nl.mod, operand0=2.0),
        lambda x: nl.floor(sb())),
    "sim_start_partition": (
        "trn2", "2.32", lambda x: nisa.tensor_copy(sb((1, 32)), sb()[3:4, :]),
        lambda x: nisa.tensor_copy(sb((1, 32)), sb()[32:33, :])),
    "sim_placed_operand": ("trn1", "2.32", lambda x: nl.exp(placed(x)),
                           lambda x: nisa.dma_copy(sb((64, 4)), placed(x))),
    "sim_view_axis": ("trn2", "2.29", lambda x: nisa.tensor_copy(sb((64, 4)), placed(x, 0)),
                      lambda x: nisa.tensor_copy(sb((64, 4)), placed(x))),
    "sim_psum_fill": ("trn2", "2.32", lambda x: nisa.memset(ps(dtype=BF16), 0.0),
                      lambda x: nisa.memset(ps(), 0.0)),
    "sim_partition_reduce": (
        "trn3", "2.32", lambda x: nisa.tensor_partition_reduce(sb((1, 32)), nl.maximum, sb()),
        lambda x: nisa.tensor_reduce(sb((64, 1)), nl.maximum, sb(), axis=1)),
    "sim_transpose_type": (
        "trn2", "2.32", lambda x: nisa.nc_transpose(ps((32, 64)), sb(dtype=BF16)),
        lambda x: nisa.nc_transpose(ps((32, 64), BF16), sb(dtype=BF16))),
    "sim_skip_in_loop": ("trn1", "2.32", lambda x: skipping(x, True),
                         lambda x: skipping(x, False)),
    "sim_nested_device_loops": ("trn2", "2.31", nested,
                                lambda x: looped(lambda i: nisa.memset(sb(), 0))),
    "sim_instruction_capacity": (
        "trn2", "2.32", lambda x: nl.add(sb((64, 20000)), sb((64, 20000))),
        lambda x: nl.add(sb((64, 2000)), sb((64, 2000)))),
    "sim_newer_core": (
        "trn1", "2.32", lambda x: nisa.tensor_copy(sb(), sb(), engine=nisa.engine.scalar),
        lambda x: nisa.activation(sb(), nl.copy, sb())),
    "sim_vector_type": (
        "trn2", "2.32",
        lambda x: nisa.tensor_scalar(sb(), sb(), nl.multiply, sb((64, 1), BF16)),
        lambda x: nisa.tensor_scalar(sb(), sb(), nl.multiply, sb((64, 1)))),
    "sim_copy_bias": (
        "trn1", "2.32", lambda x: nisa.activation(sb(), nl.copy, sb(), bias=sb((64, 1))),
        lambda x: nisa.activation(sb(), nl.copy, sb(), bias=1.0)),
    "sim_bitwise_on_float": (  # "the input/output data types must be integer types"
        "trn2", "2.32", lambda x: conjunction(BF16), lambda x: conjunction(nl.int32)),
    "sim_reduced_integers": ("trn2", "2.32", lambda x: summed(nl.int32), lambda x: summed()),
    "sim_two_psum_operands": (
        "trn2", "2.32", lambda x: nisa.tensor_tensor(sb(), zeros(), zeros(), nl.add),
        lambda x: nisa.tensor_tensor(sb(), zeros(), sb(), nl.add)),
    "err_num_partition_mismatch": ("trn2", "2.32", lambda x: nl.add(sb((1, 32)), sb()),
                                   lambda x: nl.add(nl.broadcast_to(sb((1, 32)), (64, 32)), sb())),
}  # fmt: skip


@pytest.fixture
def chosen(target, monkeypatch):
    def choose(chip, release):
        target(chip)
        monkeypatch.setenv("NEURON_CPU_NKI", release)
        # kernels are made inside of tests, which the parser up to 2.32 refuses
        monkeypatch.setenv("NKI_CPU_SILENCE", "sim_parser_subset,sim_expansion,sim_dma_on_chip")

    return choose


@pytest.mark.filterwarnings("ignore::neuron_cpu.core.device.errors.NkiWarning")
@pytest.mark.parametrize("check", REFUSED)
def test_refused_and_its_legal_neighbour(check, chosen):
    chip, release, wrong, right = REFUSED[check]
    chosen(chip, release)
    with pytest.raises(NkiError, match=rf"\[{check}\]"):
        beside(wrong).trace(X)
    beside(right).trace(X)
    assert refusals.evidence(check).source


@pytest.mark.parametrize(
    ("check", "chip", "release"),
    [("sim_placed_operand", "trn2", "2.32"), ("sim_nested_device_loops", "trn2", "2.32"),
     ("sim_partition_reduce", "trn2", "2.32")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::neuron_cpu.core.device.errors.NkiWarning")
def test_what_another_chip_or_release_takes_passes_there(check, chip, release, chosen):
    chosen(chip, release)
    beside(REFUSED[check][2]).trace(X)


def test_a_device_loop_needs_both_cores_of_a_logical_core(target, monkeypatch):
    body = beside(lambda x: looped(lambda i: nisa.memset(sb(), 0)))
    target("trn2")
    body.trace(X)  # the tests' logical cores are single ones
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG")
    with pytest.raises(NkiError, match=r"NCC_IXGM002.*kernel\[2\].*sim_loop_on_one_core"):
        beside(lambda x: looped(lambda i: nisa.memset(sb(), 1))).trace(X)
    target("trn1")
    beside(lambda x: looped(lambda i: nisa.memset(sb(), 2))).trace(X)


# --- defects --------------------------------------------------------------------------------------
@nki.jit
def shifted(x):
    out, made_sb = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm), sb()
    nisa.activation(made_sb, nl.copy, nl.load(x), bias=3.0)
    nl.store(out, made_sb)
    return out


@nki.jit
def copied(x, b):
    out, made_sb = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm), sb()
    nisa.activation(made_sb, nl.copy, nl.load(x), bias=nl.load(b))
    nl.store(out, made_sb)
    return out


def test_a_copy_takes_a_constant_bias_on_a_trn1_and_a_tile_on_a_trn2(target):
    bias = np.full((64, 1), 3, np.float32)
    with pytest.raises(NkiError, match="NCC_IBVF043.*sim_copy_bias"):
        copied(X, bias)
    assert np.array_equal(shifted(X), X + 3)
    target("trn2")
    with pytest.warns(NkiWarning, match="1296.*sim_copy_bias"):
        assert np.array_equal(copied(X, bias), X + 3)


def test_scratch_in_shared_memory_warns_on_a_trn1_alone(target):
    shared = beside(lambda x: scratch(x, nl.shared_hbm))
    with pytest.warns(NkiWarning, match="in graphs.*sim_shared_scratch"):
        shared.trace(X)
    beside(lambda x: scratch(x, nl.private_hbm)).trace(X)
    target("trn2")
    shared.trace(X)


def test_a_known_defect_warns_where_it_holds(chosen):
    body = beside(lambda x: nisa.dma_copy(sb((64, 4)), placed(x)))
    chosen("trn2", "2.31")
    with pytest.warns(NkiWarning, match="1373.*expected its workaround.*sim_dma_from_placed"):
        body.trace(X)
    chosen("trn2", "2.33")
    body.trace(X)


# --- taken ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "maximum", "minimum", "greater"])
@pytest.mark.parametrize("dtype", [nl.float32, BF16])
def test_functions_take_a_column(name, dtype, target):
    target("trn2")

    @nki.jit
    def kernel(x, m):
        outs = [nl.ndarray(x.shape, nl.float32, buffer=nl.shared_hbm) for _ in range(2)]
        tile, column = nl.load(x), nl.copy(nl.load(m), dtype=dtype)
        function = getattr(nl, name)
        nl.store(outs[0], function(tile, column))
        nl.store(outs[1], function(column, tile))
        return outs[0], outs[1]

    column = np.linspace(-3, 3, 64, dtype=np.float32).reshape(64, 1).round(1)
    rounded = column if dtype == nl.float32 else column.astype("bfloat16").astype(np.float32)
    first, second = kernel(X, column)
    assert np.array_equal(first, getattr(np, name)(X, rounded).astype(np.float32))
    assert np.array_equal(second, getattr(np, name)(rounded, X).astype(np.float32))


# --- the table ------------------------------------------------------------------------------------


def test_none_in_a_subscript_is_an_axis():
    @nki.jit
    def kernel(x):
        out = nl.ndarray((64, 3), x.dtype, buffer=nl.shared_hbm)
        tile = nl.load(x)
        assert tile[:, None, 0:4].shape == (64, 1, 4)
        for k in range(3):
            nisa.dma_copy(out[:, k : k + 1], tile[:, k][:, None])
        return out

    assert np.array_equal(kernel(X), X[:, :3])


def test_pytorch_s_float8_is_no_argument_of_a_device_before_trn3(target, monkeypatch):
    kernel, x = beside(lambda x: None), torch.zeros((8, 8), dtype=torch.float8_e4m3fn)
    for chip in ("trn1", "trn2"):
        target(chip)
        with pytest.raises(NkiError, match=r"NCC_EVRF051.*\[sim_fp8_argument\]"):
            kernel(x)
        kernel(x.view(torch.uint8))
        assert kernel.trace(x.to("meta")).today  # a tool's: shapes alone
    target("trn3")
    kernel(x)
    target("trn2")
    monkeypatch.setenv("NEURON_CC_FLAGS", "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3")
    kernel(x)


def test_packages_have_versions(monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NKI", "2.32")
    assert nki.__version__ == "0.6.0"
    assert neuronxcc.__version__.startswith("2.16.")  # neuronx-cc of SDK 2.21


def test_a_breakpoint_outside_of_eager_mode_says_so(monkeypatch):
    with pytest.warns(NkiWarning, match="NKI_CPU_EAGER=1.*sim_breakpoint"):
        beside(lambda x: breakpoint()).trace(X)
    monkeypatch.setenv("NKI_CPU_EAGER", "1")
    monkeypatch.setattr("neuron_cpu.core.program.trace._debugger", lambda: met.append(1))
    met = []
    beside(lambda x: breakpoint())(X)
    assert met == [1]
