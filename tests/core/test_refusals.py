"""Every documented error has a kernel that raises it; near a limit another one just passes.

Identifiers: aws-neuron-sdk v2.21.1 to v2.26.1, general/nki/api/nki.errors.rst. Most rows are a pair
of kernel bodies: they take HBM tensors and return the tile that the kernel stores. Breaches that
need a whole kernel (outputs, grids, annotations) stand further down.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from neuronxcc import nki
from neuronxcc.nki import compiler as ncc
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl
from neuronxcc.nki import typing as nt

from neuron_cpu.core import NkiError, NkiWarning
from neuron_cpu.core.device import errors as core_errors
from tests.warned import allows

DEFAULT = (128, 64)


def kernel_of(body):
    """A kernel that stores the tile which ``body`` returns."""

    @nki.jit
    def kernel(*inputs):
        tile = body(*inputs)
        out = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
        nl.store(out, tile)
        return out

    return kernel


def run(kernel, *shapes):
    inputs = [torch.empty(s, device="meta") for s in shapes or (DEFAULT,)]
    kernel.trace(*inputs)


def expect(kernel, identifier, *shapes):
    """Trace a kernel that must be refused, or warned of where that is all the device does."""
    with pytest.raises(NkiError) as caught:
        run(kernel, *shapes)
    assert caught.value.identifier == identifier, str(caught.value)
    return caught.value


class Case(NamedTuple):
    """One rule: a body that breaks it, one that just keeps it, and the inputs of both.

    Rules without a legal body are kept by ordinary kernels of other tests.
    """

    identifier: str
    breach: Callable[..., Any]
    legal: Callable[..., Any] | None = None
    shapes: tuple[tuple[int, ...], ...] = (DEFAULT,)
    name: str = ""


def tile(*shape, dtype=nl.float32, buffer=nl.sbuf):
    """A filled tile."""
    made = nl.ndarray(shape, dtype, buffer=buffer)
    made[...] = 1
    return made


def psum(*shape):
    """A product in PSUM."""
    return nisa.nc_matmul(tile(64, shape[0]), tile(64, shape[1]))


def rows(n):
    return nl.arange(n)[:, None]


def columns(n):
    return nl.arange(n)[None, :]


# --- bodies that need statements ------------------------------------------------------------------
def assign_index(x):
    index = nl.arange(8)[None, :]
    index[0, 5] = 1024


def store_input(x):
    nl.store(x, nl.load(x))


def store_copy(x):
    copied = nl.ndarray(x.shape, x.dtype, buffer=nl.hbm)
    nisa.dma_copy(src=x, dst=copied)
    nl.store(copied, nl.load(copied))
    return nl.load(copied)


def branch_on_arange(x):
    i = rows(128)
    if i > 4:
        return nl.load(x)


def masked_by_arange(x):
    i, j = rows(128), columns(64)
    out = tile(128, 64)
    out[i, j] = nl.load(x[i, j], mask=(i > 4))
    return out


def branch_on_data(x):
    condition = nl.load(x[0:1, 0:1])
    if condition:
        return nl.load(x)


def while_on_data(x):
    total = nl.load(x[0:1, 0:1])
    while total:
        total = nl.subtract(total, 1.0)


def block_tensor(index):
    def body(x):
        blocks = nl.ndarray((4, nl.par_dim(128), 64), nl.float32)
        for i in nl.affine_range(4):
            blocks[i] = nl.load(x)
        return nl.exp(blocks if index is None else blocks[index])

    return body


def gather(subscript):
    def body(table, index_hbm):
        index = nl.load(index_hbm, dtype=nl.int32)
        return nl.load(table[subscript(index)])

    return body


def used_after_loop(x):
    for _ in nl.sequential_range(2):
        made = nl.load(x)
    return made


@nki.jit
def inner_kernel(x):
    return nl.load(x)


def shared_in_loop(x):
    for _ in nl.affine_range(1):
        nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)


def assign(shape, value_shape):
    def body(x):
        target = tile(*shape)
        target[...] = tile(*value_shape)
        return target

    return body


def tail_load(masked):
    def body(x):
        i, j = rows(128), columns(64)
        out = tile(128, 64)
        bound = i + 64 < 100 if masked else None
        out[i, j] = nl.load(x[64 + i, j], mask=bound)
        return out

    return body


def wrote(row):
    def body(x):
        out = nl.ndarray((4, 128), nl.float32, buffer=nl.hbm)
        for i in nl.affine_range(4):
            nl.store(out[row(i) : row(i) + 1], nl.load(x[0:1]))
        return nl.load(out)

    return body


def copied_at(dynamic):
    def body(x):
        data, offset = nl.load(x), tile(1, 1, dtype=nl.int32) if dynamic else 5
        return nl.copy(data[rows(128), offset + columns(4)])

    return body


def transposed_rows(indirect):
    def body(table, index_hbm):
        index = nl.load(index_hbm, dtype=nl.int32)
        picked = table[index[rows(32), 0], columns(16)] if indirect else table[0:32, 0:16]
        return nl.load_transpose2d(picked)

    return body


# --- nki.errors of 2.21, then those added up to 2.26 ----------------------------------------------
CASES = [
    Case("err_1d_arange_not_supported", lambda x: nl.exp(tile(128, 64)[nl.arange(64), 0])),
    Case("err_activation_bias_invalid_type",
         lambda x: nisa.activation(nl.exp, nl.load(x), bias=tile(128, 1, dtype=nl.int8)),
         lambda x: nisa.activation(nl.exp, nl.load(x), bias=tile(128, 1, dtype=nl.bfloat16))),
    Case("err_activation_bias_invalid_type",
         lambda x: nisa.activation(nl.exp, nl.load(x), bias=1.0), name="number"),
    Case("err_activation_scale_invalid_type",
         lambda x: nisa.activation(nl.exp, nl.load(x), scale=tile(128, 1, dtype=nl.bfloat16))),
    Case("err_activation_scale_scalar_or_vector",
         lambda x: nisa.activation(nl.exp, nl.load(x), scale=tile(128, 64))),
    Case("err_cannot_assign_to_index", assign_index),
    Case("err_cannot_update_immutable_parameter", store_input, store_copy),
    Case("err_control_flow_condition_depending_on_arange", branch_on_arange, masked_by_arange),
    Case("err_control_flow_condition_depending_on_arange",
         lambda x: nl.load(x, mask=rows(128) < 4 and columns(64) < 4), name="and"),
    Case("err_dynamic_control_flow_not_supported", branch_on_data),
    Case("err_exceed_max_supported_dimension", lambda x: nl.transpose(tile(32, 4, 8))),
    Case("err_failed_to_infer_tile_from_local_tensor", block_tensor(None), block_tensor(2)),
    Case("err_indirect_indices_free_dim",
         gather(lambda index: (rows(64), index[rows(64), 0])), None, ((200, 16), (64, 1))),
    Case("err_indirect_indices_free_dim",
         gather(lambda index: (index[nl.mgrid[0:64, 0:16].p, 0], nl.mgrid[0:64, 0:16].x)),
         gather(lambda index: (index, columns(16))), ((200, 16), (64, 1)), name="mgrid"),
    Case("err_local_variable_used_out_of_scope", used_after_loop),
    Case("err_nested_kernel_with_spmd_grid",
         lambda x: inner_kernel[2](x), lambda x: inner_kernel(x)),
    Case("err_num_partition_exceed_arch_limit", lambda x: tile(129, 64), lambda x: tile(128, 64)),
    Case("err_num_partition_mismatch",
         lambda x: nisa.tensor_tensor(tile(128, 64), tile(1, 64), op=nl.add),
         lambda x: nisa.tensor_tensor(tile(128, 64), tile(1, 64).broadcast_to((128, 64)),
                                      op=nl.add)),
    Case("err_num_partition_mismatch",
         lambda x: nl.copy(nisa.nc_matmul(tile(64, 32), tile(128, 32))), name="matmul"),
    Case("err_shared_hbm_must_in_kernel_level", shared_in_loop),
    Case("err_size_of_dimension_exceed_arch_limit",
         lambda x: nl.copy(nisa.nc_matmul(tile(128, 129), tile(128, 64))),
         lambda x: nl.copy(nisa.nc_matmul(tile(128, 128), tile(128, 64))), name="stationary"),
    Case("err_size_of_dimension_exceed_arch_limit",
         lambda x: nl.copy(nisa.nc_matmul(tile(128, 64), tile(128, 513))),
         lambda x: nl.copy(nisa.nc_matmul(tile(128, 64), tile(128, 512))), name="moving"),
    Case("err_size_of_dimension_exceed_arch_limit",
         lambda x: nl.copy(nisa.nc_transpose(tile(64, 129))),
         lambda x: nl.copy(nisa.nc_transpose(tile(64, 128))), name="transpose"),
    Case("err_size_of_dimension_exceed_arch_limit",
         lambda x: nisa.nc_transpose(tile(32, 129), engine=nisa.vector_engine),
         lambda x: nisa.nc_transpose(tile(32, 32), engine=nisa.vector_engine), name="vector"),
    Case("err_store_dst_shape_smaller_than_other_shape",
         assign((128, 1), (128, 64)), assign((128, 64), (128, 1))),
    Case("err_tensor_access_out_of_bound", tail_load(False), tail_load(True), ((100, 64),)),
    Case("err_unexpected_output_dependencies", wrote(lambda i: 0), wrote(lambda i: i),
         ((1, 128),)),
    Case("err_unsupported_memory", lambda x: nl.load(tile(128, 64))),
    Case("err_unsupported_memory",
         lambda x: nl.copy(nisa.nc_matmul(psum(64, 64), tile(64, 64))), name="matmul"),
    Case("err_unsupported_mixing_basic_advanced_tensor_indexing",
         lambda x: nl.exp(tile(64, 64)[rows(64), 0:4])),
    Case("err_hbm_tensor_with_init_value_not_supported",
         lambda x: nl.load(nl.zeros((128, 64), nl.float32, buffer=nl.hbm))),
    Case("err_ambiguous_tensor_truth_value", lambda x: not nl.greater(nl.load(x), 0.0)),
    Case("err_while_loop_requires_unconditional_entry", while_on_data),
    Case("err_copy_dynamic_indirect_indices_not_natively_supported",
         copied_at(True)),
    Case("err_indirect_indices_are_not_supported_with_nki_api",
         transposed_rows(True), None, ((200, 16), (32, 1))),
    Case("err_unsupported_expression_in_mask", lambda x: nl.load(x, mask=(rows(128) % 4 < 2)),
         lambda x: nl.load(x, mask=(4 * rows(128) - 508 <= 0))),
    Case("err_unsupported_expression_in_mask",
         lambda x: nl.load(x, mask=nl.greater(tile(128, 64), 0.0)), name="data"),
]  # fmt: skip


# --- checks of the simulator that the vendor's compiler makes without a documented identifier -----
def keeping(identifier, breach, legal=None, *shapes, name=""):
    return Case(identifier, breach, legal, shapes or (DEFAULT,), name)


def reduced_by(op):
    def body(x):
        total = nl.ndarray((128, 1), nl.float32)
        nisa.activation_reduce(nl.exp, nl.load(x), reduce_op=op, reduce_res=total)
        return total

    return body


def half_written(rows_written):
    def body(x):
        made = nl.ndarray((128, 64), nl.float32)
        made[0:rows_written] = nl.load(x[0:rows_written])
        return made

    return body


def sbuf_tiles(count):
    def body(x):
        made = [nisa.memset((128, 11 * 1024 - 8), 0.0, nl.float32) for _ in range(count)]
        for one in made:
            nl.copy(one[:, 0:1])
        return made[0][:, 0:8]

    return body


def psum_tiles(count):
    def body(x):
        data = nl.load(x)
        made = [nl.zeros((64, 512), nl.float32, buffer=nl.psum) for _ in range(count)]
        for one in made:
            one[:, 0:64] += nisa.nc_matmul(data, data)
        total = nl.zeros((64, 64), nl.float32)
        for one in made:
            total[...] = nl.add(total, one[:, 0:64])
        return total

    return body


CASES += [
    keeping("sim_rank", lambda x: tile(128)),
    keeping("err_size_of_dimension_exceed_arch_limit",
            lambda x: nl.copy(tile(128, 513, buffer=nl.psum)),
            lambda x: nl.copy(tile(128, 512, buffer=nl.psum)), name="psum bank"),
    keeping("sim_matmul_mixed_types",
            lambda x: nl.copy(nisa.nc_matmul(tile(64, 32), tile(64, 32, dtype=nl.bfloat16))),
            lambda x: nl.copy(nisa.nc_matmul(tile(64, 32, dtype=nl.float16),
                                             tile(64, 32, dtype=nl.bfloat16)))),
    keeping("sim_matmul_type", lambda x: nl.copy(nisa.nc_matmul(tile(64, 32, dtype=nl.int8),
                                             tile(64, 32, dtype=nl.int8)))),
    keeping("sim_two_psum_operands", lambda x: nl.add(psum(64, 64), psum(64, 64)),
            lambda x: nl.add(psum(64, 64), nl.copy(psum(64, 64)))),
    keeping("err_unsupported_memory",
            lambda x: nl.power(nl.copy(psum(64, 64)), psum(64, 64)), name="gpsimd"),
    keeping("sim_reduce_axis", lambda x: nl.sum(nl.load(x), axis=0)),
    keeping("sim_activation_reduce_op", reduced_by(nl.max)),
    keeping("sim_bitwise_on_float", lambda x: nl.bitwise_and(nl.load(x), 1),
            lambda x: nl.bitwise_and(nl.load(x).view(nl.int32), 1)),
    keeping("sim_mixed_operator_classes",
            lambda x: nisa.tensor_scalar(tile(128, 64, dtype=nl.int32), nl.bitwise_and, 3,
                                         op1=nl.add, operand1=1),
            lambda x: nisa.tensor_scalar(tile(128, 64, dtype=nl.int32), nl.bitwise_and, 3,
                                         op1=nl.left_shift, operand1=1)),
    keeping("sim_mask_shape", lambda x: nl.load(x, mask=(nl.arange(63)[None, :] < 10)),
            lambda x: nl.load(x, mask=(nl.arange(64)[None, :] < 64))),
    keeping("err_size_of_dimension_exceed_arch_limit",
            lambda x: tile(8, 65537, dtype=nl.uint8)[:, 0:64],
            lambda x: tile(8, 65536, dtype=nl.uint8)[:, 0:64], name="sbuf"),
    keeping("err_size_of_dimension_exceed_arch_limit",
            lambda x: nl.add(tile(64, 4097), psum(64, 1).broadcast_to((64, 4097))),
            lambda x: nl.add(tile(64, 4096), psum(64, 1).broadcast_to((64, 4096))), name="psum"),
    keeping("err_size_of_dimension_exceed_arch_limit",
            lambda x: nisa.bn_stats(tile(128, 513)), lambda x: nisa.bn_stats(tile(128, 512)),
            name="statistics"),
    keeping("sim_undefined_data", half_written(127), half_written(128)),
]  # fmt: skip


def identity(case):
    return case.identifier + (f"-{case.name}" if case.name else "")


@pytest.mark.parametrize("case", CASES, ids=identity)
@allows("sim_loop_local_used_after")
def test_breach_is_refused(case):
    error = expect(kernel_of(case.breach), case.identifier, *case.shapes)
    # every message says what was expected and where; size errors are SyntaxErrors as well
    assert "expected" in str(error).lower() or "exceeds" in str(error)
    assert __file__ in str(error) and "kernel" in str(error)
    assert isinstance(error, SyntaxError) == (case.identifier in core_errors.SIZE_ERRORS)


@pytest.mark.filterwarnings("ignore::neuron_cpu.core.NkiWarning")
@pytest.mark.parametrize("case", [case for case in CASES if case.legal], ids=identity)
def test_near_miss_passes(case):
    run(kernel_of(case.legal), *case.shapes)


# --- doubtful constructs: warnings, errors where NKI_CPU_STRICT=1 ---------------------------------
def accumulated_onto(start):
    def body(x):
        data = nl.load(x)
        total = start((64, 64), nl.float32)
        total[...] += nisa.nc_matmul(data, data)
        return nl.copy(total)

    return body


def copied_psum(shape, dtype):
    made = nl.ndarray(shape, dtype, buffer=nl.psum)
    made[...] = 0.0
    return made


def updated_in_place(x):
    made = nl.load(x)
    made += nl.load(x)
    return made


def updated_by_assignment(x):
    made = nl.load(x)
    made[...] = made + nl.load(x)
    return made


WARNINGS = [
    keeping("sim_sbuf_capacity", sbuf_tiles(5), sbuf_tiles(4)),
    keeping("sim_psum_capacity", psum_tiles(9), psum_tiles(8)),
    keeping("sim_vector_transpose_size",
            lambda x: nisa.nc_transpose(tile(64, 32), engine=nisa.vector_engine),
            lambda x: nisa.nc_transpose(tile(32, 32), engine=nisa.vector_engine)),
    keeping("sim_gpsimd_psum",
            lambda x: nisa.affine_select(rows(64) >= columns(64), psum(64, 64), 0.0),
            lambda x: nisa.affine_select(rows(64) >= columns(64), nl.copy(psum(64, 64)), 0.0)),
    keeping("sim_reduce_middle_axis",
            lambda x: nl.sum(tile(128, 4, 8), axis=1), lambda x: nl.sum(tile(128, 4, 8), axis=2)),
    keeping("sim_start_partition",
            lambda x: nl.exp(nl.load(x)[16:48]), lambda x: nl.exp(nl.load(x)[32:64])),
    keeping("sim_start_partition",
            lambda x: nl.exp(nl.load(x)[32:96]), lambda x: nl.exp(nl.load(x)[64:128]),
            name="64 rows"),
    keeping("sim_accumulation_start", accumulated_onto(copied_psum),
            accumulated_onto(lambda shape, dtype: nl.zeros(shape, dtype, buffer=nl.psum))),
    keeping("sim_trailing_broadcast", lambda x: nl.multiply(tile(128, 4), tile(128, 4, 8)),
            lambda x: nl.multiply(tile(128, 4, 1), tile(128, 4, 8))),
    keeping("sim_newer_api",
            lambda x: nl.copy(nisa.nc_matmul(tile(64, 32), tile(64, 32), tile_position=(0, 0))),
            lambda x: nl.copy(nisa.nc_matmul(tile(64, 32), tile(64, 32)))),
]  # fmt: skip


def tile_of_blocks(shape, index):
    made = nl.ndarray(shape, nl.float32)
    made[index] = 1.0
    return nl.copy(made[index])


@pytest.mark.parametrize("case", WARNINGS, ids=identity)
def test_doubtful_construct_is_a_warning_or_an_error_or_silent(case, monkeypatch):
    with pytest.warns(NkiWarning, match=rf"{case.identifier}\]") as caught:
        run(kernel_of(case.breach), *case.shapes)
    assert caught[0].filename == __file__
    monkeypatch.setenv("NKI_CPU_STRICT", "1")
    expect(kernel_of(case.breach), case.identifier, *case.shapes)
    run(kernel_of(case.legal), *case.shapes)
    monkeypatch.setenv("NKI_CPU_SILENCE", f"something_else,{case.identifier}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        run(kernel_of(case.breach), *case.shapes)


def test_advice_is_no_error_in_strict_mode(monkeypatch):
    """Entries of the contest updated SBUF tiles in place on SDK 2.21 and were accepted."""
    monkeypatch.setenv("NKI_CPU_STRICT", "1")
    with pytest.warns(NkiWarning, match=r"before 2.23 may miscompute.*sim_inplace_operator\]"):
        run(kernel_of(updated_in_place), (128, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        run(kernel_of(updated_by_assignment), (128, 64))
        monkeypatch.setenv("NEURON_CPU_SDK", "2.23")
        run(kernel_of(updated_in_place), (128, 64))


def blocks_first(x):
    return tile_of_blocks((2, nl.par_dim(128), 4), 0)


def test_block_axes_are_deprecated_from_2_23_on(monkeypatch):
    identifier = "err_leading_dimension_of_tensor_must_be_partition"
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        run(kernel_of(blocks_first), (128, 64))
    monkeypatch.setenv("NEURON_CPU_SDK", "2.23")
    with pytest.warns(NkiWarning, match=identifier):
        run(kernel_of(blocks_first), (128, 64))


def test_release_has_to_be_known(monkeypatch):
    monkeypatch.setenv("NEURON_CPU_SDK", "2.2")
    expect(kernel_of(blocks_first), "sim_unknown_release", (128, 64))


@pytest.mark.parametrize(
    ("function", "inside", "outside"),
    [
        (nl.sin, [-3.14159, 3.14159], 3.2),
        (nl.arctan, [-1.5, 1.5], -1.6),
        (nl.log, [2.0**-64, 1.0], 0.0),
        (nl.sqrt, [0.0, 2.0**100], -1.0),
        (nl.rsqrt, [2.0**-87, 4.0], 0.0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("eager", ["0", "1"], ids=["replay", "eager"])
def test_arguments_outside_of_a_functions_range_are_told_with_their_line(
    function, inside, outside, eager, monkeypatch
):
    monkeypatch.setenv("NKI_CPU_EAGER", eager)
    kernel = kernel_of(lambda x: function(nl.load(x)))
    good, bad = torch.tensor([[*inside, inside[0]]]), torch.tensor([[*inside, outside]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        kernel(good)
    with pytest.warns(NkiWarning, match="sim_activation_range") as caught:
        kernel(bad)
    assert caught[0].filename == __file__ and f"{outside:.6g}" in str(caught[0].message)
    assert "kernel: " in str(caught[0].message)
    monkeypatch.setenv("NKI_CPU_STRICT", "1")
    with pytest.raises(NkiError, match="sim_activation_range"):
        kernel(bad)
    monkeypatch.delenv("NKI_CPU_STRICT")
    with warnings.catch_warnings():  # the buffers of the call that failed serve the next one
        warnings.simplefilter("error", NkiWarning)
        kernel(good)


def test_ranges_on_replay_leave_out_what_nobody_wrote_or_the_kernel_masks(monkeypatch):
    def every_other(x):
        i, j = nl.mgrid[0:128, 0:64]
        out = nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)
        made_sb = nl.zeros((128, 64), nl.float32)
        made_sb[i, j] = nl.sqrt(nl.load(x), mask=i + j < 100)
        nl.store(out, made_sb)
        return out

    i, j = np.mgrid[0:128, 0:64]
    x = torch.from_numpy(np.where(i + j < 100, 4.0, -4.0).astype(np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        assert nki.jit(every_other)(x).max() == 2.0
    with pytest.warns(NkiWarning, match="sim_activation_range"):
        nki.jit(every_other)(-x)
    monkeypatch.setenv("NKI_CPU_RANGES", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        nki.jit(every_other)(-x)


# --- breaches that need a whole kernel ------------------------------------------------------------
@nki.jit
def output_never_stored(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.load(x)
    return out


@nki.jit
def nothing_returned(x):
    nl.load(x)


@nki.jit
def tile_returned(x):
    return nl.load(x)


def test_outputs_must_be_written_and_returned():
    expect(output_never_stored, "err_tensor_output_not_written_to")
    expect(nothing_returned, "err_tensor_output_not_written_to")
    expect(tile_returned, "err_unsupported_memory")


# --- annotations (neuronxcc.nki.typing) -----------------------------------------------------------
@nki.jit
def annotated_wrongly(x):
    made: nt.tensor[128, 512] = nl.load(x)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, made)
    return out


@nki.jit
def annotated_rightly(x):
    made: nt.tensor[128, 64] = nl.load(x)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, made)
    return out


@nki.jit
def mutable_dropped(x: nt.mutable_tensor):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x))
    return out


@nki.jit
def mutable_returned(x: nt.mutable_tensor):
    nl.store(x, nl.exp(nl.load(x)))
    return x


def test_annotated_shapes_are_checked():
    error = expect(annotated_wrongly, "err_annotation_shape_mismatch")
    assert "(128, 64)" in str(error) and "(128, 512)" in str(error)
    run(annotated_rightly)


def test_mutable_parameters_must_be_returned():
    expect(mutable_dropped, "err_mutable_parameter_not_returned")
    run(mutable_returned)


# --- direct allocation (neuronxcc.nki.compiler) ---------------------------------------------------
def allocated(shape, byte, dtype=nl.float32):
    return nl.ndarray(shape, dtype, buffer=ncc.sbuf.mod_alloc(base_addr=byte))


def bank(shape, number, dtype=nl.float32):
    return nl.ndarray(shape, dtype, buffer=ncc.psum.mod_alloc(base_bank=number))


def allocated_exp(with_bias):
    def body(x):
        data, result = allocated((128, 64), 0), allocated((128, 64), 1024)
        zero = allocated((128, 1), 2048)
        data[...] = nl.load(x)
        zero[...] = nisa.memset((128, 1), 0.0, nl.float32)
        result[...] = nisa.activation(nl.exp, data, bias=zero if with_bias else None)
        return result

    return body


def allocated_transpose(on_tensor_engine):
    def body(x):
        data, result = allocated((32, 32), 0), allocated((32, 32), 1024)
        data[...] = nl.load(x)
        if on_tensor_engine:
            turned = bank((32, 32), 0)
            turned[...] = nisa.nc_transpose(data, engine=nisa.tensor_engine)
            result[...] = nl.copy(turned)
        else:
            result[...] = nisa.nc_transpose(data, engine=nisa.vector_engine)
        return result

    return body


def allocated_with_value(with_value):
    def body(x):
        where = ncc.sbuf.mod_alloc(base_addr=0)
        if with_value:
            return nl.zeros((128, 64), nl.float32, buffer=where)
        made = nl.ndarray((128, 64), nl.float32, buffer=where)
        made[...] = nl.load(x)
        return made

    return body


ALLOCATION = [
    keeping("err_bias_tensor_must_be_specified_in_allocation",
            allocated_exp(False), allocated_exp(True)),
    keeping("err_transpose_on_tensor_engine_not_allowed_in_allocated_kernel",
            allocated_transpose(True), allocated_transpose(False), (32, 32)),
    keeping("err_tensor_creation_on_scratchpad_with_init_value_not_allowed",
            allocated_with_value(True), allocated_with_value(False)),
]  # fmt: skip


@pytest.mark.parametrize("case", ALLOCATION, ids=identity)
def test_direct_allocation_forbids_hidden_tensors(case):
    expect(kernel_of(case.breach), case.identifier, *case.shapes)
    run(kernel_of(case.legal), *case.shapes)


# --- arguments, classes of errors -----------------------------------------------------------------
@pytest.mark.parametrize(
    "call",
    [
        lambda x: nisa.tensor_copy(x, colour=1),
        lambda x: nisa.tensor_copy(x, 1, 2, 3, 4, 5),
        lambda x: nl.exp(),
        lambda x: nl.ndarray((4, 4)),
    ],
)
def test_arguments_that_do_not_fit_have_the_kernel_s_line(call):
    message = expect(kernel_of(lambda x: call(nl.load(x))), "sim_arguments", (128, 64))
    assert __file__ in str(message) and "expected " in str(message)


@pytest.mark.parametrize(
    "call", [nl.exp, nl.load, nisa.tensor_copy, lambda x: nisa.nc_matmul(x, x)]
)
def test_tile_operations_outside_of_a_kernel(call):
    with pytest.raises(NkiError, match="err_nki_api_outside_of_nki_kernel"):
        call(np.ones((4, 4), np.float32))


def test_error_classes():
    """Size errors can be caught as SyntaxError, as the vendor raises them; all as NkiError."""
    with pytest.raises(SyntaxError, match="Size of partition dimension 256 exceeds architecture"):
        run(kernel_of(lambda x: tile(256, 64)))
    assert np.issubdtype(nl.float32, np.floating)
