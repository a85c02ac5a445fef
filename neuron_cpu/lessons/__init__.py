"""Twelve exercises from a vector add to decode attention, and the messages that each is about.

A lesson is a folder of ``course``: ``exercise.py`` (task, a kernel that fails, what the check asks
for), ``hints.txt`` and ``solution.py``. They stand in the package, not among the documents, so that
``neuron_cpu learn`` has them wherever the package is installed; a learner edits a copy.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent / "course"


class Lesson(NamedTuple):
    """One exercise.

    Attributes:
        name: of its folder and of its kernel.
        teaches: in a few words.
        messages: identifiers of the errors and warnings that it is about, separated by blanks.
        words: of sentences without an identifier that it is about: Python's, and of wrong results.
    """

    name: str
    teaches: str
    messages: str = ""
    words: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        return LESSONS.index(self) + 1

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")

    @property
    def exercise(self) -> Path:
        return FOLDER / self.name / "exercise.py"

    @property
    def solution(self) -> Path:
        return FOLDER / self.name / "solution.py"

    @property
    def hints(self) -> list[str]:
        """Each says more than the one before."""
        text = (FOLDER / self.name / "hints.txt").read_text(encoding="utf-8")
        return text.strip().split("\n\n")


LESSONS = (
    Lesson(
        name="vector_add",
        teaches="the memories: load to SBUF, compute, store to HBM",
        messages="err_unsupported_memory err_tensor_output_not_written_to sim_private_result "
        "err_shared_hbm_must_in_kernel_level err_cannot_update_immutable_parameter sim_shape "
        "err_nki_api_outside_of_nki_kernel err_hbm_tensor_with_init_value_not_supported "
        "sim_buffer sim_assignment_type sim_operand_type sim_shape_mismatch "
        "sim_partial_output err_store_dst_shape_smaller_than_other_shape sim_tensor_iteration "
        "sim_arguments sim_dtype sim_constant sim_number sim_types_differ sim_tensor_operator "
        "sim_tensor_assignment sim_unknown_keyword sim_no_arguments sim_list_argument "
        "sim_sequence sim_read_only_input sim_fill_type sim_view_dtype sim_vector_type "
        "sim_unknown_name sim_foreign_call "
        "sim_dma_on_chip sim_device_print sim_jit_option sim_newer_api sim_newer_core "
        "sim_newer_release sim_former_spelling "
        "sim_engine sim_engine_operators sim_unary_integers sim_expansion "
        "sim_register_operand sim_parser_subset sim_inner_body sim_negative_divisor "
        "err_mutable_parameter_not_returned "
        "err_annotation_shape_mismatch "
        "err_tensor_creation_on_scratchpad_with_init_value_not_allowed",
        words=(
            "in a kernel use nl.",
            "is not an NKI type",
            "has no values while",
            "; return that shape",
            "raises NameError",
            "raises AttributeError",
            "raises UnboundLocalError",
        ),
    ),
    Lesson(
        name="masked_tail",
        teaches="128 partitions, indices, and masks for what is left over",
        messages="err_tensor_access_out_of_bound err_num_partition_exceed_arch_limit "
        "err_1d_arange_not_supported err_unsupported_expression_in_mask sim_mask_shape "
        "err_unsupported_mixing_basic_advanced_tensor_indexing sim_index_rank sim_index_shape "
        "err_control_flow_condition_depending_on_arange sim_index_type sim_empty_slice "
        "err_dynamic_control_flow_not_supported err_ambiguous_tensor_truth_value "
        "err_cannot_assign_to_index sim_operand_mask sim_matmul_mask sim_reduce_mask "
        "sim_affine_select_predicate sim_range_select sim_iota_expression sim_index_tile "
        "sim_tensor_truth "
        "sim_ap_offset sim_ap_out_of_bound sim_dynamic_slice sim_placed_operand sim_duplicate_rows "
        "sim_sequence_bounds sim_vector_offsets "
        "sim_reduce_mask_parts sim_predicated_types sim_pattern sim_needs_values",
    ),
    Lesson(
        name="undefined_data",
        teaches="memory that nobody has written",
        messages="sim_undefined_data sim_output_partly_written",
    ),
    Lesson(
        name="races",
        teaches="which loops are independent, and whose tiles are whose",
        messages="err_unexpected_output_dependencies err_local_variable_used_out_of_scope "
        "sim_loop_bound sim_loop_condition sim_loop_index_value sim_loop_local_used_after "
        "sim_loop_min_max sim_loop_rebinding sim_loop_side_effect sim_nested_device_loops "
        "err_while_loop_requires_unconditional_entry sim_loop_body sim_loop_reduce_target "
        "sim_endless_loop sim_ordered_loop sim_race_of_chosen_rows sim_copies_of_a_kernel "
        "sim_grid sim_grid_data sim_launch sim_program_axis sim_shared_hbm_differs "
        "sim_one_core sim_core_barrier "
        "sim_cores_write_alike sim_lost_product sim_psum_bank sim_inexact_integers "
        "sim_atomic_rmw sim_rmw_operator err_nested_kernel_with_spmd_grid",
    ),
    Lesson(
        name="tiled_matmul",
        teaches="TensorE's operands, their sizes, and PSUM",
        messages="err_size_of_dimension_exceed_arch_limit sim_matmul_type sim_matmul_mixed_types "
        "sim_matmul_output_type sim_psum_capacity sim_two_psum_operands sim_rank "
        "sim_matmul_transpose sim_array_tile sim_array_tile_place "
        "sim_double_row sim_narrow_product "
        "sim_gpsimd_psum sim_unpublished_limit sim_microscaled sim_scale_of_ones "
        "sim_scale_packing",
    ),
    Lesson(
        name="psum_accumulation",
        teaches="sums of products, and what may begin one",
        messages="sim_accumulated_result sim_accumulation_region sim_accumulation_start "
        "sim_sums_share_tensor "
        "sim_inplace_operator err_activation_bias_invalid_type "
        "err_activation_scale_invalid_type err_activation_scale_scalar_or_vector "
        "sim_accumulation_loop sim_rounded_sums sim_reduce_command sim_reduce_registers "
        "sim_select_reduce_command err_bias_tensor_must_be_specified_in_allocation",
        words=("first instruction that parts from the same kernel in fp32",),
    ),
    Lesson(
        name="transposes",
        teaches="which axis lies on partitions, and how to turn it",
        messages="err_num_partition_mismatch err_exceed_max_supported_dimension "
        "err_failed_to_infer_tile_from_local_tensor sim_partition_stride "
        "sim_transposed_operand sim_vector_transpose_size sim_start_partition sim_reduce_axis "
        "sim_transpose_type sim_transpose_by_dma sim_dma_transpose_axes sim_permute "
        "sim_rearrange sim_reduce_middle_axis sim_shuffle_mask sim_shuffle_partitions "
        "sim_tensor_indirection "
        "sim_local_gather sim_unsupported_reverse sim_average sim_topk_place sim_nan_compared "
        "err_transpose_on_tensor_engine_not_allowed_in_allocated_kernel",
        words=("in a kernel use nl.transpose",),
    ),
    Lesson(
        name="double_buffering",
        teaches="DMA and engines at the same time",
        messages="sim_sbuf_capacity err_leading_dimension_of_tensor_must_be_partition "
        "sim_allocation_address sim_allocation_hbm sim_allocation_overlap "
        "sim_allocation_partition sim_mixed_allocation sim_schedule_name sim_schedule_order "
        "sim_instruction_name sim_dma_engine sim_dma_sources sim_dma_one_source "
        "sim_static_descriptors sim_hwdge_types sim_hwdge_offsets",
    ),
    Lesson(
        name="weight_layout",
        teaches="long rows for DMA, by choice of who lies where",
        messages="sim_reshape sim_access_pattern_axes sim_view_axis sim_squeeze sim_expand_dims",
    ),
    Lesson(
        name="fusing",
        teaches="one pass through memory, two operations an instruction",
        messages="sim_vector_operand sim_reduce_res_shape sim_stretched_operand sim_broadcast "
        "sim_trailing_broadcast sim_mixed_operator_classes sim_unknown_operator "
        "sim_broadcast_result sim_reduce_operator sim_scan_shape sim_bn_aggr_size "
        "sim_bitwise_on_float sim_percentile sim_topk sim_search_size sim_search_types "
        "sim_search_values sim_nonzero sim_exchange_size",
    ),
    Lesson(
        name="running_softmax",
        teaches="softmax of rows that come in pieces",
        messages="sim_activation_range sim_activation_function sim_activation_reduce_op "
        "sim_softmax",
        words=("first instruction whose result is infinite or NaN",),
    ),
    Lesson(
        name="decode_attention",
        teaches="all of it: heads that share keys, one pass over the cache",
        messages="sim_indirect_axis sim_indirect_twice sim_gather_index_type "
        "err_indirect_indices_free_dim err_indirect_indices_are_not_supported_with_nki_api "
        "err_copy_dynamic_indirect_indices_not_natively_supported",
    ),
)
# Messages that no lesson is about: ranks, other chips and releases, files, random numbers.
_ELSEWHERE = (
    "sim_all_reduce sim_all_reduce_incomplete sim_benchmark_iterations sim_benchmark_neff_name "
    "sim_channels sim_collective sim_collective_counts sim_collective_dim sim_dma_profile "
    "sim_dropout_probability sim_dropout_types "
    "sim_random_stream sim_jax_tracer sim_profile_directory "
    "sim_profile_exists sim_random_seed sim_random_state sim_random_type sim_rank_alone "
    "sim_rank_missing sim_rank_number sim_ranks_differ sim_replica_group sim_unknown_release "
    "sim_unknown_target"
)
WITHOUT = frozenset(_ELSEWHERE.split())
ABOUT = {message: lesson for lesson in LESSONS for message in lesson.messages.split()}
_IDENTIFIERS = re.compile(r"\[((?:err|sim)_\w+)\]")


def pointers(text: str, besides: Lesson | None = None) -> list[str]:
    """A line for each lesson, one apart, that a message in ``text`` is about.

    Messages of kernels end in their identifier in brackets; others are known by their words.
    """
    found = [ABOUT.get(identifier) for identifier in _IDENTIFIERS.findall(text)]
    told = {words: one for one in LESSONS for words in one.words if words in text}
    # The words that say most: "use nl.transpose" is no matter of any "use nl.".
    found += [
        told[words] for words in told if not any(words in more for more in told.keys() - {words})
    ]
    about = dict.fromkeys(found)
    if "do not broadcast the partition axis" in text:  # the same identifier as a transpose's
        about.pop(ABOUT["err_num_partition_mismatch"], None)
    return [
        f"Lesson {lesson.number} ({lesson.title}) is about this: neuron_cpu learn {lesson.number}"
        for lesson in about
        if lesson not in (None, besides)
    ]


def with_pointers(text: str) -> str:
    """The text, and its `pointers` below."""
    return "\n".join([text.rstrip("\n"), *pointers(text)])


@contextmanager
def pointed_out() -> Iterator[None]:
    """Inside the block warnings of kernels are followed by their `pointers`."""
    usual = warnings.formatwarning

    def pointing(*arguments: Any, **keywords: Any) -> str:
        return with_pointers(usual(*arguments, **keywords)) + "\n"

    warnings.formatwarning = pointing
    try:
        yield
    finally:
        warnings.formatwarning = usual
