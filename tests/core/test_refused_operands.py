"""The simulator's own rules for operands and arguments: what breaks each, what just keeps it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from neuronxcc import nki
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

from neuron_cpu.core import NkiError
from neuron_cpu.core.instructions.arguments import reduce_cmd
from neuron_cpu.core.time.schedule import schedule
from tests.core.test_refusals import (
    Case,
    columns,
    expect,
    identity,
    keeping,
    kernel_of,
    rows,
    run,
    tile,
)


# --- bodies that need statements ------------------------------------------------------------------
def accumulated(second):
    def body(x):
        total = nl.zeros((64, 64), nl.float32, buffer=nl.psum)
        for part in (slice(0, 32), second):
            width = part.stop - part.start
            total[:, part] += nisa.nc_matmul(tile(128, 64), tile(128, width))
        return nl.copy(total[:, 0:32])

    return body


def assigned(value):
    def body(x):
        made = tile(128, 64)
        made[...] = value() if callable(value) else value
        return made

    return body


def added_to_rows(op, indirect=True):
    def body(x):
        target = nl.ndarray((128, 64), nl.float32, buffer=nl.hbm)
        nl.store(target, nl.load(x))
        index = nisa.iota(rows(16), dtype=nl.int32)
        at = target[index[rows(16), 0], columns(64)] if indirect else target[0:16]
        nl.atomic_rmw(at, nl.load(x[0:16]), op)
        return nl.load(target)

    return body


def sums_kept(commands):
    def body(x):
        total = nl.ndarray((128, 1), nl.float32)
        for command in commands:
            nisa.activation(
                nl.exp, nl.load(x), reduce_op=np.add, reduce_res=total, reduce_cmd=command
            )
        return total

    return body


def sum_into(*shape):
    def body(x):
        total = nl.ndarray(shape, nl.float32)
        nisa.activation_reduce(nl.exp, nl.load(x), reduce_op=np.add, reduce_res=total)
        return total[:, 0:1]

    return body


def added_by_dma(op):
    def body(x):
        copied = nl.ndarray((128, 64), nl.float32, buffer=nl.hbm)
        nl.store(copied, nl.load(x))
        nisa.dma_copy(src=x, dst=copied, dst_rmw_op=op)
        return nl.load(copied)

    return body


def predicated(predicate, src=nl.float32):
    def body(x):
        made = tile(128, 64)
        nisa.tensor_copy_predicated(
            src=tile(128, 64, dtype=src), dst=made, predicate=tile(128, 64, dtype=predicate)
        )
        return made

    return body


def selected(op, command):
    def body(x):
        made, most = tile(128, 64), nl.ndarray((128, 1), nl.float32)
        nisa.select_reduce(
            dst=made,
            predicate=tile(128, 64, dtype=nl.uint8),
            on_true=tile(128, 64),
            on_false=0.0,
            reduce_res=most,
            reduce_cmd=command,
            reduce_op=op,
        )
        return most

    return body


def shuffled(mask, partitions=64):
    def body(x):
        made = tile(partitions, 8)
        nisa.nc_stream_shuffle(src=tile(partitions, 8), dst=made, shuffle_mask=mask)
        return made

    return body


def gathered(index, rows_of_data=32, **options):
    def body(x):
        data = tile(rows_of_data, 8)
        return nisa.local_gather(data, tile(*index[:-1], dtype=index[-1]), **options)

    return body


def searched(values):
    def body(x):
        return nisa.nc_find_index8(data=tile(128, 64), vals=tile(128, values))

    return body


def looped(bound):
    def body(x):
        made = tile(128, 2)
        for k in nl.affine_range(bound() if callable(bound) else bound):
            made[:, nl.ds(k, 1)] = 1.0
        return made

    return body


def masked_product(mask, moving=lambda: tile(64, 32)):
    def body(x):
        made = nl.ndarray((32, 32), nl.float32, buffer=nl.psum)
        made[...] = nisa.nc_matmul(tile(64, 32), moving(), mask=mask())
        return nl.copy(made[0:1, 0:1])

    return body


def seeded(seed):
    def body(x):
        nl.random_seed(seed() if callable(seed) else seed)
        return nl.rand((128, 64))

    return body


def product_into(dtype):
    def body(x):
        made = nl.zeros((32, 32), dtype, buffer=nl.psum)
        made[...] += nisa.nc_matmul(tile(64, 32), tile(64, 32))
        return nl.copy(made)

    return body


def triangles(x):
    """A mask that leaves no box of a result."""
    i, j, k = nl.mgrid[0:4, 0:3, 0:2]
    return nl.max(nl.load(x)[i, j + k], axis=[1, 2], mask=j + k < 3)


LANES = list(range(32))
CASES: list[Case] = [
    keeping("sim_accumulation_region", accumulated(slice(16, 48)), accumulated(slice(32, 64))),
    keeping("sim_activation_function", lambda x: nisa.activation(nl.add, nl.load(x))),
    keeping("sim_affine_select_predicate",
            lambda x: nisa.affine_select((rows(128) >= columns(64)) & (columns(64) > 3),
                                         nl.load(x), 0.0)),
    keeping("sim_assignment_type", assigned("text"), assigned(2)),
    keeping("sim_assignment_type", assigned(lambda: [1.0]), name="list"),
    keeping("sim_atomic_rmw", added_to_rows(np.multiply), added_to_rows(np.add)),
    keeping("sim_atomic_rmw", added_to_rows(np.add, indirect=False), name="direct"),
    keeping("sim_bn_aggr_size", lambda x: nisa.bn_aggr(tile(128, 8))),
    keeping("sim_broadcast", lambda x: nl.add(tile(128, 64), tile(128, 3))),
    keeping("sim_broadcast", lambda x: nl.copy(tile(128, 3).broadcast_to((128, 6))), name="view"),
    keeping("sim_buffer", lambda x: nl.ndarray((128, 64), nl.float32, buffer="sbuf")),
    keeping("sim_dma_transpose_axes",
            lambda x: nisa.dma_transpose(tile(64, 32, dtype=nl.bfloat16), axes=(0, 1))),
    keeping("sim_dropout_types",
            lambda x: nisa.dropout(tile(128, 64, dtype=nl.int32), tile(128, 1, dtype=nl.bfloat16))),
    keeping("sim_empty_slice", lambda x: nl.load(x[0:128, 8:8]), lambda x: nl.load(x[0:128, 8:9])),
    keeping("sim_empty_slice", lambda x: nl.load(x[0:128, 9:8]), name="reversed"),
    keeping("sim_engine", lambda x: nisa.tensor_copy(nl.load(x), engine=nisa.tensor_engine),
            lambda x: nisa.tensor_copy(nl.load(x), engine=nisa.scalar_engine)),
    keeping("sim_expand_dims", lambda x: nl.copy(nl.expand_dims(nl.load(x), 1))),
    keeping("sim_gather_index_type",
            lambda x: nl.gather_flattened(tile(128, 64), tile(128, 8, dtype=nl.int32))),
    keeping("sim_index_rank", lambda x: nl.load(x[0:128, 0:64, 0])),
    keeping("sim_index_rank", lambda x: nl.load(x[..., 0:128, 0:64, 0]), name="ellipsis"),
    keeping("sim_iota_expression", lambda x: nisa.iota(nl.arange(8), dtype=nl.int32)),
    keeping("sim_iota_expression", lambda x: nisa.iota(3.0, dtype=nl.int32), name="number"),
    keeping("sim_local_gather", gathered((32, 2, nl.uint32)), gathered((32, 2, nl.uint16))),
    keeping("sim_local_gather", gathered((30, 2, nl.uint16), 30), name="partitions"),
    keeping("sim_local_gather", gathered((16, 2, nl.uint16)), gathered((32, 2, nl.uint16)),
            name="rows of the index"),
    keeping("sim_local_gather", gathered((32, 2, nl.uint16), num_elem_per_idx=3),
            gathered((32, 2, nl.uint16), num_elem_per_idx=4), name="width"),
    keeping("sim_local_gather", gathered((32, 2, nl.uint16), num_valid_indices=33),
            gathered((32, 2, nl.uint16), num_valid_indices=32), name="count"),
    keeping("sim_local_gather", gathered((32, 2, nl.uint16), num_valid_indices=0),
            gathered((32, 2, nl.uint16), num_valid_indices=1), name="none"),
    keeping("sim_loop_bound", looped(2.0)),
    keeping("sim_loop_bound", looped(lambda: tile(1, 1)), looped(np.int32(2)), name="tile"),
    keeping("sim_matmul_mask", masked_product(lambda: rows(32) >= columns(32)),
            masked_product(lambda: columns(32) < 16)),
    keeping("sim_matmul_mask", masked_product(lambda: columns(32) < 16,
                                              lambda: tile(64, 4, 16)[:, :, 0:8]), name="axes"),
    keeping("sim_matmul_output_type", product_into(nl.bfloat16)),
    keeping("sim_operand_type", lambda x: nl.exp(3.0)),
    keeping("sim_operand_type", lambda x: nisa.tensor_scalar(nl.load(x), np.add, "1"),
            lambda x: nisa.tensor_scalar(nl.load(x), np.add, np.float32(1)), name="scalar"),
    keeping("sim_operand_type", lambda x: nl.add(nl.load(x), columns(64)), name="index"),
    keeping("sim_partition_stride", lambda x: nl.copy(tile(64, 64)[0:64:2, :])),
    keeping("sim_predicated_types", predicated(nl.int32)),
    keeping("sim_predicated_types", predicated(nl.uint8, nl.bfloat16), name="source"),
    keeping("sim_random_seed", seeded("1")),
    keeping("sim_random_seed", seeded(1.5), seeded(lambda: tile(1, 1, dtype=nl.int32)),
            name="float"),
    keeping("sim_reduce_operator", lambda x: nisa.tensor_partition_reduce(np.multiply, nl.load(x))),
    keeping("sim_reduce_operator", lambda x: nisa.tensor_reduce(np.power, nl.load(x), axis=(1,)),
            lambda x: nisa.tensor_reduce(np.multiply, nl.load(x), axis=(1,)), name="free axes"),
    keeping("sim_reduce_registers", sums_kept([reduce_cmd.idle]),
            sums_kept([reduce_cmd.reset_reduce, reduce_cmd.idle])),
    keeping("sim_reduce_res_shape", sum_into(128, 2)),
    keeping("sim_rmw_operator", added_by_dma(np.multiply)),
    keeping("sim_scan_shape",
            lambda x: nisa.tensor_tensor_scan(tile(128, 8, 8), tile(128, 8, 8), 0.0, np.add,
                                              np.add)),
    keeping("sim_scan_shape",
            lambda x: nisa.tensor_tensor_scan(tile(128, 64), tile(128, 63), 0.0, np.add, np.add),
            name="sizes"),
    keeping("sim_search_values", searched(7)),
    keeping("sim_select_reduce_command", selected(np.add, reduce_cmd.reset_reduce)),
    keeping("sim_select_reduce_command", selected(np.max, reduce_cmd.reduce), name="command"),
    keeping("sim_sequence_bounds", lambda x: nisa.sequence_bounds(segment_ids=tile(2, 8))),
    keeping("sim_sequence_bounds",
            lambda x: nisa.sequence_bounds(segment_ids=tile(1, 8, dtype=nl.int16)), name="type"),
    keeping("sim_shape", lambda x: nl.zeros((128, 0), nl.float32)),
    keeping("sim_shape", lambda x: nl.zeros((128, 2.0), nl.float32),
            lambda x: tile(128, np.int64(2)), name="type"),
    keeping("sim_shuffle_mask", shuffled([*LANES[:-1], 32]), shuffled([*LANES[:-1], 255])),
    keeping("sim_shuffle_mask", shuffled(LANES[:-1]), name="length"),
    keeping("sim_shuffle_mask", shuffled([-1, *LANES[1:]]), name="negative"),
    keeping("sim_shuffle_partitions", shuffled(LANES, 48), shuffled(LANES, 96)),
    keeping("sim_tensor_iteration", lambda x: nl.copy(next(iter(nl.load(x))))),
    keeping("sim_unsupported_reverse",
            lambda x: nisa.tensor_scalar_reduce(
                data=nl.load(x), op0=np.add, operand0=1.0, reduce_op=np.add, reverse0=True,
                reduce_res=nl.ndarray((128, 1), nl.float32))),
    keeping("sim_index_type", lambda x: nl.load(x[0 : x.shape[0] / 2])),
    keeping("sim_index_type", lambda x: nl.load(x[nl.arange(x.shape[0] / 2)[:, None], columns(9)]),
            name="range"),
    keeping("sim_reduce_mask", triangles),
    keeping("sim_shape_mismatch",
            lambda x: nisa.tensor_tensor(tile(128, 4), tile(128, 2), nl.multiply)),
    keeping("sim_unknown_keyword",
            lambda x: nisa.nc_matmul(nl.load(x), nl.load(x), perf_mode="double_row_gen3")),
    keeping("sim_view_dtype", lambda x: nl.load(x).view(nl.float8_e4m3)),
    keeping("sim_vector_operand", lambda x: nisa.tensor_scalar(nl.load(x), np.add, tile(128, 2))),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::neuron_cpu.core.NkiWarning")
@pytest.mark.parametrize("case", CASES, ids=identity)
def test_breach_is_refused(case):
    error = expect(kernel_of(case.breach), case.identifier, *case.shapes)
    assert any(word in str(error) for word in ("expected", "cannot", "; "))
    assert __file__ in str(error)


@pytest.mark.filterwarnings("ignore::neuron_cpu.core.NkiWarning")
@pytest.mark.parametrize("case", [case for case in CASES if case.legal], ids=identity)
def test_near_miss_passes(case):
    run(kernel_of(case.legal), *case.shapes)


# --- grids and runners ----------------------------------------------------------------------------
@pytest.mark.parametrize("axis", [1, -1])
def test_program_id_names_an_axis_of_the_grid(axis):
    def kernel_for(number):
        @nki.jit
        def kernel(x):
            out = nl.ndarray((2, 128, 64), nl.float32, buffer=nl.shared_hbm)
            nl.store(out[nl.program_id(number)], nl.load(x))
            return out

        return kernel[2]

    expect(kernel_for(axis), "sim_program_axis")
    run(kernel_for(0))


def test_grid_instances_share_outputs_of_one_shape():
    def kernel_for(columns_of):
        @nki.jit
        def kernel(x):
            first = nl.program_id(0)
            out = nl.ndarray((2, 128, columns_of(first)), nl.float32, buffer=nl.shared_hbm)
            nl.store(out[first, :, 0:8], nl.load(x[:, 0:8]))
            return out

        return kernel[2]

    expect(kernel_for(lambda instance: 8 + 8 * int(instance)), "sim_shared_hbm_differs")
    run(kernel_for(lambda instance: 8))


@pytest.mark.parametrize("masked", [False, True])
def test_all_reduce_takes_whole_tiles_outside_of_eager_mode(masked):
    def kernel_for(mask, **options):
        def kernel(x):
            out = nl.ndarray((2, 8, 8), nl.float32, buffer=nl.shared_hbm)
            total = nl.all_reduce(nl.load(x), np.add, 0, mask=mask())
            nl.store(out[nl.program_id(0)], total)
            return out

        return nki.jit(kernel, **options)[2]

    legal = kernel_for(lambda: None)
    assert np.array_equal(legal(X), np.full((2, 8, 8), 2.0))
    breach = kernel_for(lambda: columns(8) < 4) if masked else kernel_for(lambda: None, eager=True)
    with pytest.raises(NkiError) as caught:
        breach(X)
    assert caught.value.identifier == "sim_all_reduce"


def double(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.multiply(nl.load(x), 2.0))
    return out


X = np.ones((8, 8), np.float32)


def test_orders_of_a_schedule_have_names():
    program = nki.jit(double).trace(torch.empty(8, 8))
    with pytest.raises(NkiError) as caught:
        schedule(program, order="backwards")
    assert caught.value.identifier == "sim_schedule_order"
