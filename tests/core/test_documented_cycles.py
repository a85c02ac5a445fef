"""Engine cycles of every instruction, against the costs that its docstring in the SDK gives.

aws-neuron-sdk v2.21.1, nki.isa docstrings (later instructions: the release that brought them). N is
the number of elements per partition; no instruction takes less than 64 cycles.
"""

import numpy as np
import pytest
import torch
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

from neuron_cpu.core import Kernel

pytestmark = pytest.mark.filterwarnings("ignore::neuron_cpu.core.NkiWarning")

BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8


def cycles(body, name, *inputs):
    """Cycles of the last instruction ``name`` that ``body`` records on loaded inputs."""

    def kernel(*tensors):
        out = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.shared_hbm)
        body(*(nl.load(t) for t in tensors))
        nl.store(out, value=nisa.memset((1, 1), 1.0, nl.float32))
        return out

    args = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in inputs]
    recorded = [i for i in Kernel(kernel).trace(*args).instructions if i.op.name == name]
    found = recorded[-2] if name == "memset" else recorded[-1]
    return found.op.cycles(found)


def filled(value, dtype):
    return lambda: nisa.memset((128, 512), value, dtype)


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (0.0, nl.bfloat16, 256),
        (0.0, nl.float16, 256),
        (0.0, nl.float32, 512),
        (1.0, nl.bfloat16, 512),
    ],
)
def test_zeros_of_two_bytes_are_filled_two_a_cycle(value, dtype, expected):
    assert cycles(filled(value, dtype), "memset") == expected


@pytest.mark.parametrize(
    ("op", "dtype", "result", "expected"),
    [
        (nl.add, BF16, nl.bfloat16, 256),
        (nl.max, BF16, nl.bfloat16, 256),
        (nl.min, BF16, nl.bfloat16, 512),
        (nl.add, BF16, nl.float32, 512),
        (nl.add, F32, nl.float32, 512),
    ],
)
def test_sums_and_maxima_of_bf16_take_two_elements_a_cycle(op, dtype, result, expected):
    def body(x):
        nisa.tensor_reduce(op, x, axis=1, dtype=result)

    assert cycles(body, "tensor_reduce", ((128, 512), dtype)) == expected


@pytest.mark.parametrize(
    ("types", "ops", "columns", "expected"),
    [
        ((BF16, BF16), (nl.subtract, nl.multiply), 512, 512),
        ((BF16, BF16), (nl.subtract, nl.multiply), 511, 1022),
        ((BF16, BF16), (nl.multiply, nl.subtract), 512, 1024),
        ((F32, BF16), (nl.subtract, nl.multiply), 512, 1024),
    ],
)
def test_scalar_tensor_tensor_is_fast_for_one_form_only(types, ops, columns, expected):
    def body(x, y):
        nisa.scalar_tensor_tensor(data=x, op0=ops[0], operand0=1.0, op1=ops[1], operand1=y)

    inputs = [((128, columns), dtype) for dtype in types]
    assert cycles(body, "scalar_tensor_tensor", *inputs) == expected


@pytest.mark.parametrize(("memory", "expected"), [(nl.psum, 100), (nl.sbuf, 200)])
def test_a_predicated_copy_is_twice_as_fast_from_psum(memory, expected):
    def body(x, p):
        source, target = (nl.ndarray((128, 100), nl.float32, buffer=b) for b in (memory, nl.sbuf))
        source[...] = nisa.tensor_copy(x)
        target[...] = nisa.tensor_copy(x)
        nisa.tensor_copy_predicated(src=source, dst=target, predicate=p)

    found = cycles(body, "tensor_copy_predicated", ((128, 100), F32), ((128, 100), U8))
    assert found == expected


@pytest.mark.parametrize(
    ("dtype", "width", "words"),
    [(F32, 1, 1), (F32, 8, 1), (BF16, 1, 1), (BF16, 8, 2), (U8, 2, 2), (U8, 32, 4)],
)
def test_local_gather_takes_150_cycles_and_the_rate_of_its_docstring(dtype, width, words):
    """150 + count e / C with C = ((28 + 4 e) / 4 e) / min(4 / bytes of an element, e)."""

    def body(x, index):
        nisa.local_gather(x, index, num_elem_per_idx=width, num_valid_indices=10)

    inputs = ((128, 64), dtype), ((128, 2), torch.uint16)
    rate = (28 + 4 * width) / (4 * width * words)
    assert cycles(body, "local_gather", *inputs) == pytest.approx(150 + 10 * width / rate)


def test_instructions_of_gpsimd_start_with_150_cycles():
    def pattern():
        nisa.iota(nl.arange(128)[:, None] + nl.arange(300)[None, :], dtype=nl.int32)

    def selected(x):
        i, j = nl.arange(128)[:, None], nl.arange(300)[None, :]
        nisa.affine_select(pred=(i >= j), on_true_tile=x, on_false_value=0.0)

    assert cycles(pattern, "iota") == 450
    assert cycles(selected, "affine_select", ((128, 300), F32)) == 450


def test_costs_that_nobody_publishes_grow_with_the_elements():
    """Estimates: a reduction over partitions passes all of them, segment bounds go both ways."""

    def bounds(ids):
        nisa.sequence_bounds(segment_ids=ids)

    def rows(x):
        nisa.tensor_partition_reduce(np.add, x)

    assert cycles(bounds, "sequence_bounds", ((1, 100), F32)) == 150 + 2 * 100
    assert cycles(rows, "tensor_partition_reduce", ((16, 30), F32)) == 150 + 16 * 30


@pytest.mark.parametrize(
    ("shape", "dtype", "engine", "expected"),
    [
        ((128, 128), BF16, nisa.tensor_engine, 128),
        ((100, 8), BF16, nisa.tensor_engine, 100),
        ((16, 100), BF16, nisa.tensor_engine, 64),
        ((128, 128), F32, nisa.tensor_engine, 512),  # four passes, as in a product
        ((32, 32), F32, nisa.vector_engine, 64),
    ],
)
def test_transposes(shape, dtype, engine, expected):
    def body(x):
        nisa.nc_transpose(x, engine=engine)

    assert cycles(body, "nc_transpose", (shape, dtype)) == expected


@pytest.mark.parametrize(("apart", "expected"), [(1, 512), (4, 512), (5, 1024), (64, 1024)])
@pytest.mark.parametrize("trailing", [False, True])  # a last axis of one element changes nothing
def test_strides_beyond_16_bytes_halve_the_rate(apart, expected, trailing):
    def body(x):
        nisa.activation(nl.exp, x[:, :, 0:1] if trailing else x[:, :, 0])

    assert cycles(body, "activation", ((128, 512, apart), F32)) == expected


@pytest.mark.parametrize(
    ("columns", "step", "dtype", "expected"),
    [
        (512, 1, BF16, 512),
        (16, 1, BF16, 64),
        (100, 1, BF16, 100),
        (100, 9, BF16, 200),
        (100, 1, F32, 400),  # four passes
    ],
)
def test_products_stream_their_moving_columns(columns, step, dtype, expected):
    def body(a, b):
        nisa.nc_matmul(a, b[:, 0 : columns * step : step])

    inputs = ((128, 128), dtype), ((128, columns * step), dtype)
    assert cycles(body, "nc_matmul", *inputs) == expected


@pytest.mark.parametrize(("dtype", "passes"), [(F32, 2), (BF16, 1)])
def test_products_with_an_identity_take_half_the_passes_of_fp32(dtype, passes):
    def body(x):
        nisa.nc_matmul(x, x, is_transpose=True)

    assert cycles(body, "nc_matmul", ((128, 128), dtype)) == passes * 128
