"""Names, order and defaults of everything that SDK 2.32 documents under ``nki``.

Source: aws-neuron-sdk v2.32.0, nki/api/nki (signatures; annotations are left out).
"""

import inspect
import re

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import pytest

ISA = """
activate2(dst, op, data, imm0, imm1, op0, op1, relu_param=0.0, reverse0=False, reverse1=False,
    reduce_op=None, reduce_res=None, reduce_cmd=reduce_cmd.idle, name=None)
activation(dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None,
    reduce_cmd=reduce_cmd.idle, name=None)
activation_reduce(dst, op, data, reduce_op, reduce_res, bias=None, scale=1.0, name=None)
affine_select(dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=equal,
    offset=0, name=None)
bn_aggr(dst, data, name=None)
bn_stats(dst, data, name=None)
core_barrier(data, cores, engine=engine.gpsimd, name=None)
dma_compute(dst, srcs, reduce_op, scales=None, unique_indices=True, oob_mode=oob_mode.error,
    name=None)
dma_copy(dst, src, priority=None, oob_mode=oob_mode.error, dge_mode=dge_mode.unknown,
    engine=engine.unknown, name=None)
dma_transpose(dst, src, axes=None, priority=None, dge_mode=dge_mode.unknown,
    oob_mode=oob_mode.error, name=None)
dropout(dst, data, prob, name=None)
exponential(dst, src, max_value=0.0, reduce_res=None, reduce_cmd=reduce_cmd.idle,
    reduce_init=0.0, name=None)
get_nc_sub_version()
get_nc_version()
iota(dst, pattern, offset=0, channel_multiplier=0, name=None)
local_gather(dst, src_buffer, index, num_elem_per_idx=1, num_valid_indices=None, name=None)
max8(dst, src, name=None)
memset(dst, value, engine=engine.unknown, name=None)
nc_find_index8(dst, data, vals, name=None)
nc_match_replace8(dst, data, vals, imm, dst_idx=None, name=None)
nc_matmul(dst, stationary, moving, is_stationary_onezero=False, is_moving_onezero=False,
    is_transpose=False, accumulate=None, tile_position=(), tile_size=(),
    perf_mode=matmul_perf_mode.none, name=None)
nc_matmul_mx(dst, stationary, moving, stationary_scale, moving_scale, tile_position=None,
    tile_size=None, accumulate=None, name=None)
nc_n_gather(dst, data, indices, name=None)
nc_stream_shuffle(dst, src, shuffle_mask, name=None)
nc_transpose(dst, data, engine=engine.unknown, name=None)
nonzero_with_count(dst, src, index_offset=0, padding_val=-1, name=None)
quantize_mx(dst, src, dst_scale, name=None)
rand2(dst, min, max, name=None)
rand_get_state(dst, engine=engine.gpsimd, name=None)
rand_set_state(src_seeds, engine=engine.gpsimd, name=None)
range_select(dst, on_true_tile, comp_op0, comp_op1, bound0, bound1,
    reduce_cmd=reduce_cmd.reset_reduce, reduce_res=None, reduce_op=maximum, range_start=0,
    on_false_value=..., name=None)
reciprocal(dst, data, name=None)
register_alloc(x=None)
register_load(dst, src)
register_move(dst, src)
register_store(dst, src)
rng(dst, engine=engine.vector, name=None)
scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False,
    reduce_cmd=reduce_cmd.reset_reduce, reduce_op=..., reduce_res=None, name=None)
select_reduce(dst, predicate, on_true, on_false, reduce_res=None, reduce_cmd=reduce_cmd.idle,
    reduce_op=maximum, reverse_pred=False, name=None)
sendrecv(src, dst, send_to_rank, recv_from_rank, pipe_id, dma_engine=dma_engine.dma, name=None)
sequence_bounds(dst, segment_ids, name=None)
set_rng_seed(src_seeds, name=None)
tensor_copy(dst, src, engine=engine.unknown, name=None)
tensor_copy_predicated(dst, src, predicate, reverse_pred=False, name=None)
tensor_partition_reduce(dst, op, data, name=None)
tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None)
tensor_scalar(dst, data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False,
    engine=engine.unknown, name=None)
tensor_scalar_cumulative(dst, src, op0, op1, imm0, imm1=None,
    reduce_cmd=reduce_cmd.reset_reduce, name=None)
tensor_scalar_reduce(dst, data, op0, operand0, reduce_op, reduce_res=None, reverse0=False,
    reduce_cmd=reduce_cmd.reset_reduce, reduce_init=None, reduce_res_negate=False, name=None)
tensor_tensor(dst, data1, data2, op, engine=engine.unknown, name=None)
tensor_tensor_scan(dst, data0, data1, initial, op0, op1, reverse0=False, reverse1=False,
    name=None)
topk(val_dst, idx_dst, src, n, name=None)
"""
BINARY = (
    "add subtract multiply divide maximum minimum abs_max abs_min power fmod mod equal not_equal "
    "less less_equal greater greater_equal bitwise_and bitwise_or bitwise_xor left_shift "
    "right_shift logical_and logical_or logical_xor"
)
UNARY = (
    "invert logical_not abs square exp log sqrt rsqrt tanh sigmoid relu gelu gelu_apprx_sigmoid "
    "gelu_apprx_tanh gelu_dx gelu_apprx_sigmoid_dx silu silu_dx softplus mish erf erf_dx "
    "reciprocal sin cos tan arctan copy ceil floor trunc negative sign"
)
REDUCTIONS = "sum max min mean prod var"
RANGES = "affine_range sequential_range static_range dynamic_range"
LANGUAGE = "\n".join(
    [f"{name}(x, y, dtype=None)" for name in BINARY.split()]
    + [f"{name}(x, dtype=None)" for name in UNARY.split()]
    + [f"{name}(x, axis, dtype=None, keepdims=False)" for name in REDUCTIONS.split()]
    + [f"{name}(start, stop=None, step=1)" for name in RANGES.split()]
    + [
        "all(x, axis, dtype=None)",
        "softmax(x, axis=-1, dtype=None)",
        "rms_norm(x, w, axis, n, epsilon=1e-06, dtype=None, compute_dtype=None)",
        "where(condition, x, y, dtype=None)",
        "dropout(x, rate, dtype=None)",
        "ones(shape, dtype, buffer=sbuf, name='')",
        "zeros(shape, dtype, buffer=sbuf, name='')",
        "full(shape, fill_value, dtype, buffer=sbuf, name='')",
        "zeros_like(x, dtype=None, buffer=None, name='')",
        "empty_like(x, dtype=None, buffer=None, name='')",
        "ndarray(shape, dtype, buffer=sbuf, name='', address=None)",
        "rand(shape, dtype, buffer=sbuf, name='')",
        "random_seed(seed)",
        "shared_constant(constant)",
        "shared_identity_matrix(n, dtype=uint8, dst=None)",
        "load(src, dtype=None)",
        "store(dst, value)",
        "load_transpose2d(src, dtype=None)",
        "transpose(x, dtype=None)",
        "matmul(x, y, transpose_x=False)",
        "expand_dims(x, axis)",
        "broadcast_to(x, shape, dtype=None)",
        "gather_flattened(data, indices, axis=0, dtype=None)",
        "ds(start, size)",
        "fori_loop(lower, upper, body_fun, step=1)",
        "while_loop(init, body_fun)",
        "no_reorder()",
        "program_id(axis=0)",
        "num_programs(axes=0)",
        "program_ndim()",
        "device_print(print_prefix, tensor)",
        "is_hbm(buffer)",
        "is_on_chip(buffer)",
        "is_psum(buffer)",
        "is_sbuf(buffer)",
    ]
)
COLLECTIVES = """
all_reduce(srcs, dsts, replica_group, op, priority=None, name=None)
all_gather(srcs, dsts, replica_group, collective_dim, priority=None, name=None)
reduce_scatter(srcs, dsts, replica_group, collective_dim, op, priority=None, name=None)
all_to_all(srcs, dsts, replica_group, collective_dim, priority=None, name=None)
collective_permute(srcs, dsts, source_target_pairs, priority=None, name=None)
rank_id(name=None)
all_gather_v(srcs, dsts, replica_group, metadata_tensor, recv_counts_known=False,
    has_rdispls=False, priority=None, name=None)
all_to_all_v(srcs, dsts, replica_group, metadata_tensor, recv_counts_known=False,
    has_rdispls=False, priority=None, name=None)
collective_permute_implicit(srcs_by_channel, dsts_by_channel, replica_group, channel_ids=[0],
    priority=None, name=None)
collective_permute_implicit_reduce(srcs0_by_channel, srcs1_by_channel, dsts_by_channel,
    replica_group, op, channel_ids=[0], priority=None, name=None)
collective_permute_implicit_current_processing_rank_id(iteration_id, replica_group,
    channel_id=0, name=None)
"""


def split(signature):
    """(name, [(parameter, default or None)]) of a line of the tables above."""
    name, inside = re.fullmatch(r"(\w+)\((.*)\)", signature.strip()).groups()
    parts = re.findall(r"(\w+)(?:=((?:\([^)]*\)|\[[^]]*\]|[^,])+))?(?:, |$)", inside)
    return name, [(p, d or None) for p, d in parts]


def signatures(text):
    return [split(line) for line in re.sub(r"\n +", " ", text.strip()).splitlines()]


@pytest.mark.parametrize(
    ("module", "text", "count"),
    [(nisa, ISA, 52), (nl, LANGUAGE, 103), (ncc, COLLECTIVES, 11)],
    ids=["isa", "language", "collectives"],
)
def test_every_documented_function_has_its_signature(module, text, count):
    expected = signatures(text)
    assert len(expected) == count
    for name, parameters in expected:
        found = inspect.signature(getattr(module, name)).parameters.values()
        assert [p.name for p in found] == [p for p, _ in parameters], name
        for one, (_, default) in zip(found, parameters):
            # an operator or an elided value stands as None here: the function knows which
            if default in ("equal", "maximum", "...", "[0]") or name == "core_barrier":
                continue
            shown = one.default
            if default is None:
                assert shown is inspect.Parameter.empty, (name, one.name)
            else:
                want = default.split(".")[-1] if "." in default and "0" not in default else default
                assert want in (repr(shown), getattr(shown, "name", None), str(shown)), name
        assert inspect.getdoc(getattr(module, name)), name
