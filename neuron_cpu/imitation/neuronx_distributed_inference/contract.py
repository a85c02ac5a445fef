"""The version of NxDI that the stand-in behaves as, and the differences between versions.

`NEURON_CPU_NXDI` names the version. The default is 0.1, and 0.9 for a program that has imported
`models.qwen3_moe`. A configuration reads the variable once, when it is made, and carries its
Contract: everything that is built for it follows that Contract. Every difference is a property
below; no other file compares versions. Sources: the tags v0.1.0 to v0.7.14366 and commit c63afe0 of
aws-neuron/neuronx-distributed-inference.
"""

import os
import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Dict, Optional

from neuron_cpu.core.device.errors import within
from neuron_cpu.errors import StandInError

VERSIONS = ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6")
# For mixtures of experts these are themselves. What they changed of a Llama is not modelled: for
# one they are 0.6.
EXPERT_VERSIONS = ("0.7", "0.8", "0.9")
DEFAULT_VERSION = "0.1"
ENVIRONMENT_VARIABLE = "NEURON_CPU_NXDI"
QWEN3_MOE = "neuronx_distributed_inference.models.qwen3_moe"
_LAST = len(VERSIONS) + len(EXPERT_VERSIONS)
# Attributes of NeuronConfig that some versions lack: the minor versions of the first and the last
# that has it.
_FIELDS = {
    name: versions
    for versions, names in {
        (1, 1): "is_paged_attention quantized_kernel_lower_bound trace_tokengen_model",
        (2, _LAST): (
            "activation_quantization_type allow_input_truncation is_block_kv_layout "
            "is_prefill_stage is_prefix_caching is_mlp_quantized kv_cache_batch_size "
            "kv_cache_padding_size logical_nc_config modules_to_not_convert quantize_clamp_bound "
            "token_tree_config"
        ),
        (2, 3): "cp_max_num_seqs cp_num_active_blocks",
        (3, _LAST): (
            "attn_tkg_builtin_kernel_enabled fused_rmsnorm_skip_gamma k_cache_transposed "
            "qkv_kernel_fuse_residual_add"
        ),
        (4, _LAST): "apply_seq_ids_mask cast_type chunked_prefill_config cp_degree prefix_buckets",
        (8, _LAST): "kv_quant_config",
    }.items()
    for name in names.split()
}


def _within(first: int, last: int = _LAST) -> property:
    """A property: whether a version's minor number lies from `first` to `last`, both included."""
    return property(lambda self: first <= self.minor <= last)


@dataclass(frozen=True)
class Contract:
    """The behaviour of one NxDI version; `minor` is the version's second number."""

    minor: int

    @property
    def version(self) -> str:
        return f"0.{self.minor}"

    # -- configuration ---------------------------------------------------------------------------

    def has_field(self, name: str) -> bool:
        """Whether NeuronConfig has the attribute `name`; True for a name outside of the table."""
        first, last = _FIELDS.get(name, (1, _LAST))
        return first <= self.minor <= last

    @property
    def async_keyword(self) -> str:
        """The keyword that sets `NeuronConfig.async_mode`."""
        return "async" if self.minor == 1 else "async_mode"

    # `rpl_reduce_dtype` defaults to `torch_dtype`; else to None, which each layer resolves.
    reduces_in_model_dtype = _within(1, 3)

    # `attn_kernel_enabled` defaults to None, and NxDI decides by the prompt; else to False.
    leaves_attention_kernel_open = _within(4)

    @property
    def physical_cores(self) -> int:
        """Cores of a logical core: from 0.7 on two where the environment says so, else one."""
        chip = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")
        return 2 if self.minor >= 7 and chip in ("trn2", "trn3") else 1

    # Default of `save_sharded_checkpoint`.
    saves_sharded_checkpoint = _within(1, 2)

    # A `max_context_length` above `max_length` is refused.
    limits_context_length = _within(5)

    # Default of `OnDeviceSamplingConfig.do_sample`, and what the adapter goes by.
    samples_by_default = _within(1, 1)

    # -- quantised checkpoints -------------------------------------------------------------------

    # Loading a quantised checkpoint ties a tied head; 0.1 leaves it as it is. Since then keys that
    # end in `weight_scale`, as other tools write them, are taken, too.
    ties_quantised_head = _within(2)

    @property
    def fp8_scale_floor(self) -> float:
        """The least scale of a row in fp8."""
        return 1e-5 if self.minor >= 2 else 0.0

    # -- sub-models and their inputs -------------------------------------------------------------

    # The wrapper pads to the first bucket strictly above the mask length. 0.1 takes the first
    # bucket that holds the prompt, counting ids that are not padding.
    pads_to_bucket = _within(2)

    # The traced forward gets seven inputs instead of five.
    passes_dummies = _within(2)

    # A sub-model's configuration says by `is_prefill_stage` which of the two it is.
    marks_prefill = _within(2)

    # A model with a `speculation_length` has no single-token graph. 0.1 compiles both. A subclass
    # may still call `enable_token_generation` itself.
    speculation_replaces_decode = _within(2)

    # The speculation bucket is chosen above cached and new tokens; 0.1: above cached ones.
    bucket_holds_speculation = _within(2)

    # -- adapters --------------------------------------------------------------------------------

    # Adapters' checkpoints are read; 0.1 builds their layers and leaves them at zero.
    loads_adapters = _within(2)

    # -- continuous batching ---------------------------------------------------------------------

    # Decode sorts its rows by sequence id in the graph, so any order of them is right. Later the
    # wrapper sorts them, and a whole batch not even there.
    graph_sorts_rows = _within(1, 1)

    # A prefill graph writes one cache line, so `ctx_batch_size` has to be 1.
    prefills_one_line = _within(2)

    # Rows that fill a decode batch write at position 0 of lines that the call leaves out. So in
    # 0.1.0; from 0.1.1 on they repeat the first row, at its position.
    idle_rows_are_zeros = _within(1, 1)

    # Caches of blocks are whole: block tables and two-dimensional buckets. 0.1 has the names, 0.2
    # and 0.3 no buckets of prefixes.
    reads_blocks = _within(4)

    # -- layers and attention --------------------------------------------------------------------

    # Layers get a `rotary_position_ids` keyword.
    passes_rotary_positions = _within(2)

    # Layers get cache keywords and a `residual`, and return five items instead of four. Projections
    # and attention hand the residual on as one more result, too.
    passes_residual = _within(3)

    @property
    def layer_inputs(self) -> Dict[str, Optional[int]]:
        """Graph inputs that every layer gets, each with its value where a graph has none."""
        chunks = ("cache_mask", "cache_reordered_idx", "current_reordered_idx")
        tiles = ("tile_q_indices", "tile_block_tables", "tile_masks")
        blocks = ("active_block_table", "num_queries", "scatter_index", "kv_active_mask")
        if self.minor < 3:
            return dict.fromkeys(chunks if self.minor == 2 else ())
        given = dict.fromkeys((*blocks, "kvcache_buffer", *(chunks if self.minor == 3 else tiles)))
        later = {"padding_mask": None, "windowed_context_encoding_window_idx": -1}
        return given | (later if self.minor >= 7 else {})

    # Layers get a `local_mask` keyword.
    passes_local_mask = _within(5)

    # `get_model_output` reads and writes the cache itself.
    body_updates_cache = _within(3)

    # Sequence-parallel prefill gathers one row of each rank instead of the whole sequence.
    slices_last_token = _within(3)

    # `NeuronAttentionBase(config, *, hidden_size, ...)` builds its own projections.
    attention_takes_config = _within(4)

    # `NeuronAttentionBase.forward` accepts keywords that its signature does not name.
    attention_takes_keywords = _within(2)

    # Attention refuses a head_dim that is not hidden_size / heads.
    heads_fill_hidden_size = _within(1, 1)

    # `generate` hands on its configuration's top_k, top_p and temperature, whatever
    # `sampling_params` it was given.
    generate_names_draws = _within(3)

    # `output_logits` gives both; before they are a list, which nothing reads.
    gives_tokens_and_logits = _within(4)

    # Sampling parameters may be a temperature of 0 or a `top_k` of 0.
    takes_zeros = _within(6)

    # The last columns of the logits, as many as pad a sharded head, are the least number. That is
    # the padding where each rank has its own columns. Where they are gathered and cut, real tokens
    # are hidden. 0.1 hides nothing, so zeros of the padding may be chosen.
    masks_padded_vocabulary = _within(2)

    # A graph compiled for top_k = 1 takes the arg-maximum, though `do_sample` is set.
    samples_above_top_1_only = _within(1, 1)


def field_versions(name: str) -> str:
    """The versions in which NeuronConfig has the attribute `name`; "" outside of the table."""
    if name not in _FIELDS:
        return ""
    first, last = _FIELDS[name]
    return f"0.{first} or later" if last == _LAST else f"0.{first}"


_thread = threading.local()


def building_under(contract: Contract) -> AbstractContextManager[None]:
    """Inside the block, what this thread builds follows `contract`. Projections, samplers and the
    attention of NxDI 0.1 get no configuration: the block tells them."""
    return within(_thread, contract=contract)


def contract() -> Contract:
    """The contract of the model under construction, else the environment's. StandInError where the
    environment names none of VERSIONS."""
    building = getattr(_thread, "contract", None)
    if building is not None:
        return building
    default = EXPERT_VERSIONS[-1] if QWEN3_MOE in sys.modules else DEFAULT_VERSION
    version = os.environ.get(ENVIRONMENT_VARIABLE, "") or default
    if version not in VERSIONS + EXPERT_VERSIONS:
        raise StandInError(
            f"{ENVIRONMENT_VARIABLE} names an unknown NxDI version, expected one of "
            f"{', '.join(VERSIONS + EXPERT_VERSIONS)}, got {version!r}; unset it for {default}."
        )
    return Contract(minor=int(version.split(".")[1]))
