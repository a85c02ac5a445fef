"""Defects planted into small kernels of the current language: each is told, at its own line.

The line of a defect ends with the comment ``# here``. What is told is an error or a warning, while
the kernel is traced or while it runs; its place or its message names that line.
"""

import inspect
import warnings

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError, NkiWarning
from tests.nki.tiles import ps, sb

X = np.random.default_rng(7).normal(size=(128, 64)).astype(np.float32)
DEFECTS = {}


def planted(message, cores=1, x=X, target="trn2"):
    """Note a kernel's body with the message that it has to give."""

    def note(function):
        DEFECTS[function.__name__] = (function, message, cores, x, target)
        return function

    return note


def filled(shape, dtype=nl.float32):
    tile = sb(shape, dtype)
    nisa.memset(tile, 1)
    return tile


# --- TensorE and PSUM -----------------------------------------------------------------------------
@planted("err_num_partition_mismatch")
def contraction_of_other_sizes(x, out):
    nisa.nc_matmul(ps((64, 64)), filled((64, 64)), filled((128, 64)))  # here


@planted("sim_psum_bank")
def product_over_two_banks(x, out):
    nisa.nc_matmul(ps((64, 1024))[:, 300:700], filled((64, 64)), filled((64, 400)))  # here


@planted("sim_lost_product")
def first_product_dropped(x, out):
    acc, one = ps((64, 64)), filled((64, 64))
    nisa.nc_matmul(acc, one, one)
    nisa.nc_matmul(acc, one, one, accumulate=False)  # here
    nisa.tensor_copy(sb((64, 64)), acc)


@planted("sim_double_row")
def double_rows_of_bf16(x, out):
    one = filled((64, 2, 64), nl.bfloat16)
    mode = nisa.matmul_perf_mode.double_row
    nisa.nc_matmul(ps((64, 64)), one, one, perf_mode=mode)  # here


@planted("sim_vector_transpose_size")
def large_transpose_on_vector(x, out):
    nisa.nc_transpose(sb((64, 64)), filled((64, 64)), engine=nisa.engine.vector)  # here


# --- what is in memory ----------------------------------------------------------------------------


@planted("sim_undefined_data")
def half_a_tile_unwritten(x, out):
    tile = sb((128, 64))
    nisa.dma_copy(tile[:, 0:32], x[:, 0:32])
    nisa.dma_copy(out, tile)  # here


@planted("sim_allocation_overlap")
def tile_overwritten_at_its_address(x, out):
    first = nl.ndarray((128, 64), nl.float32, buffer=nl.sbuf, address=(0, 0))
    second = nl.ndarray((128, 64), nl.float32, buffer=nl.sbuf, address=(0, 128))
    nisa.dma_copy(first, x)
    nisa.memset(second, 0.0)
    nisa.dma_copy(out, first)  # here


@planted("sim_ap_out_of_bound")
def pattern_beyond_the_end(x, out):
    nisa.dma_copy(sb((128, 64)), x.ap([[64, 128], [1, 64]], offset=1))  # here


@planted("sim_partition_stride")
def pattern_that_skips_partitions(x, out):
    nisa.tensor_copy(sb((64, 64)), filled((128, 64)).ap([[128, 64], [1, 64]]))  # here


@planted("sim_broadcast_result")
def result_without_elements_of_its_own(x, out):
    nisa.memset(sb((128, 1)).broadcast(1, 8), 0.0)  # here


# --- operands -------------------------------------------------------------------------------------


@planted("sim_two_psum_operands")
def two_operands_in_psum(x, out):
    a, b = ps((64, 64)), ps((64, 64))
    nisa.tensor_tensor(sb((64, 64)), a, b, nl.add)  # here


@planted("err_unsupported_memory")
def gpsimd_reads_psum(x, out):
    nisa.tensor_copy(sb((64, 64)), ps((64, 64)), engine=nisa.engine.gpsimd)  # here


@planted("sim_fill_type")
def fraction_into_integers(x, out):
    nisa.memset(sb((4, 4), nl.int32), 0.5)  # here


@planted("sim_shuffle_mask")
def shuffle_from_nowhere(x, out):
    nisa.nc_stream_shuffle(sb((64, 4)), filled((1, 4)), [0] * 32)  # here


@planted("sim_types_differ")
def shuffle_of_other_types(x, out):
    nisa.nc_stream_shuffle(sb((32, 4)), filled((32, 4), nl.bfloat16), [0] * 32)  # here


@planted("sim_instruction_name")
def one_name_twice(x, out):
    nisa.memset(sb((4, 4)), 0.0, name="fill")
    nisa.memset(sb((4, 4)), 0.0, name="fill")  # here


# --- values ---------------------------------------------------------------------------------------
@planted("sim_activation_range")
def sine_of_large_angles(x, out):
    tile = filled((128, 64))
    nisa.tensor_scalar(tile, tile, nl.multiply, 9.0)
    nisa.activation(tile, nl.sin, tile)  # here


# --- two cores ------------------------------------------------------------------------------------


@planted("err_unexpected_output_dependencies", cores=2)
def no_barrier_between(x, out):
    me, shared = nl.program_id(), nl.ndarray((2, 64), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(shared[me : me + 1, :], x[0:1, :])
    nisa.dma_copy(sb((1, 64)), shared[1 - me : 2 - me, :])  # here


@planted("sim_rank_number", cores=2)
def sends_to_itself(x, out):
    tile, me = filled((128, 64)), nl.program_id()
    nisa.sendrecv(tile, tile, me, me, 0)  # here


@planted("sim_core_barrier", cores=2)
def barrier_of_a_tile(x, out):
    nisa.core_barrier(filled((4, 4)), (0, 1))  # here


# --- twenty-one more ------------------------------------------------------------------------------
def loaded(x):
    tile = sb(x.shape, x.dtype)
    nisa.dma_copy(tile, x)
    return tile


@planted("sim_shape_mismatch")
def transpose_into_the_shape_it_had(x, out):
    nisa.nc_transpose(ps((128, 64)), loaded(x))  # here


@planted("sim_search_size")
def eight_largest_of_four(x, out):
    nisa.max8(sb((128, 8)), loaded(x)[:, 0:4])  # here


@planted("err_size_of_dimension_exceed_arch_limit")
def stationary_of_too_many(x, out):  # no dst has 160 partitions
    nisa.nc_matmul(ps((128, 64)), filled((128, 160)), filled((128, 64)))  # here


@planted("err_size_of_dimension_exceed_arch_limit")
def statistics_of_too_many(x, out):
    nisa.bn_stats(sb((128, 6)), filled((128, 600)))  # here


@planted("sim_shape_mismatch")
def sums_on_into_a_part(x, out):
    total, tile = ps((64, 64)), loaded(x)
    nisa.nc_matmul(total, tile, tile)
    nisa.nc_matmul(total[:, 0:32], tile, tile)  # here


@planted("sim_psum_capacity")
def nine_banks(x, out):
    totals = [ps((128, 512)) for _ in range(9)]
    for total in totals:
        nisa.nc_matmul(total, filled((128, 128)), filled((128, 512)))  # here
    for total in totals:
        nisa.tensor_copy(sb((128, 512)), total)


@planted("sim_activation_range")
def logarithm_of_negatives(x, out):
    nisa.activation(sb((128, 64)), op=nl.log, data=loaded(x))  # here


@planted("err_tensor_access_out_of_bound")
def rows_that_data_choose_beyond_the_end(x, out):
    rows, tile = sb((128, 1), nl.int32), sb((128, 64))
    nisa.iota(rows, [[0, 1]], 1, 1)
    nisa.dma_copy(tile, x.ap([[64, 128], [1, 64]], vector_offset=rows))  # here
    nisa.dma_copy(out, tile)


@planted("sim_permute")
def partitions_last(x, out):
    loaded(x).permute((1, 0))  # here


@planted("sim_shape_mismatch", cores=2)
def exchange_of_other_sizes(x, out):
    other = 1 - nl.program_id()
    nisa.sendrecv(loaded(x), sb((128, 32)), other, other, 0)  # here


def line_of(function):
    lines, first = inspect.getsourcelines(function)
    return first + next(k for k, line in enumerate(lines) if line.rstrip().endswith("# here"))


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_told_at_its_line(name, target):
    body, message, cores, x, chip = DEFECTS[name]
    target(chip)

    @nki.jit
    def kernel(x):
        out = nl.ndarray((128, 64), x.dtype, buffer=nl.shared_hbm)
        body(x, out)
        nisa.dma_copy(out[:, 0:64], x)
        return out

    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kernel[cores](x)
        except NkiError as error:
            told.append((error.identifier, str(error)))
    for one in caught:
        if issubclass(one.category, NkiWarning):
            told.append((str(one.message), f"{one.filename}:{one.lineno} {one.message}"))
    mine = [place for identifier, place in told if message in identifier]
    assert mine, told
    line = line_of(body)
    assert any(f":{line}" in place or f"line {line}" in place for place in mine), (line, mine)
