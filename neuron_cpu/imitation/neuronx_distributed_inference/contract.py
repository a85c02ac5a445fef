"""The libraries that the imitation stands for, and every difference between them.

They are the contest's NxDI 0.1, and 0.6, the last one for the language of the contest. 0.9 is 0.6
for all but mixtures of experts, which earlier releases compute otherwise. Any release runs itself
where checkouts are named (docs/libraries.md). `NEURON_CPU_NXDI` names the library; without it a
configuration's class does. A configuration carries its Contract, which everything that is built for
it follows. No other file compares versions. Sources: the tags v0.1.0 and v0.6.10598 and commit
c63afe0 of aws-neuron/neuronx-distributed-inference.
"""

import os
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields

from neuron_cpu.core.device.errors import within
from neuron_cpu.errors import StandInError

FIRST, LATER, EXPERTS = "0.1", "0.6", "0.9"
VERSIONS = (FIRST, LATER)
ENVIRONMENT_VARIABLE = "NEURON_CPU_NXDI"
# Attributes of NeuronConfig that not every library has -> those that have it.
_FIELDS = {
    name: versions
    for versions, names in {
        (FIRST,): "is_paged_attention quantized_kernel_lower_bound trace_tokengen_model",
        (LATER, EXPERTS): (
            "activation_quantization_type allow_input_truncation is_block_kv_layout "
            "is_prefill_stage is_prefix_caching is_mlp_quantized kv_cache_batch_size "
            "kv_cache_padding_size logical_nc_config modules_to_not_convert quantize_clamp_bound "
            "token_tree_config attn_tkg_builtin_kernel_enabled fused_rmsnorm_skip_gamma "
            "k_cache_transposed qkv_kernel_fuse_residual_add apply_seq_ids_mask cast_type "
            "chunked_prefill_config cp_degree prefix_buckets"
        ),
        (EXPERTS,): "kv_quant_config",
    }.items()
    for name in names.split()
}
_OF_LAYERS = dict.fromkeys(
    ("active_block_table", "num_queries", "scatter_index", "kv_active_mask", "kvcache_buffer")
    + ("tile_q_indices", "tile_block_tables", "tile_masks")
)
_OF_EXPERTS = {"padding_mask": None, "windowed_context_encoding_window_idx": -1}


@dataclass(frozen=True)
class Contract:
    """What 0.6 does. A flag is what 0.1 does the other way; CONTRACTS has the other rows."""

    version: str = LATER

    # -- configuration ---------------------------------------------------------------------------

    # The keyword that sets `NeuronConfig.async_mode`.
    async_keyword: str = "async_mode"
    # `rpl_reduce_dtype` defaults to `torch_dtype`; else to None, which each layer resolves.
    reduces_in_model_dtype: bool = False
    # `attn_kernel_enabled` defaults to None, and NxDI decides by the prompt; else to False.
    leaves_attention_kernel_open: bool = True
    # Default of `save_sharded_checkpoint`.
    saves_sharded_checkpoint: bool = False
    # A `max_context_length` above `max_length` is refused.
    limits_context_length: bool = True
    # Default of `OnDeviceSamplingConfig.do_sample`, and what the adapter goes by.
    samples_by_default: bool = False

    # -- sub-models and their inputs -------------------------------------------------------------

    # The wrapper pads to the first bucket strictly above the mask length. 0.1 takes the first
    # bucket that holds the prompt, counting ids that are not padding.
    pads_to_bucket: bool = True
    # The traced forward gets seven inputs instead of five.
    passes_dummies: bool = True
    # A sub-model's configuration says by `is_prefill_stage` which of the two it is.
    marks_prefill: bool = True
    # A model with a `speculation_length` has no single-token graph. 0.1 compiles both. A subclass
    # may still call `enable_token_generation` itself.
    speculation_replaces_decode: bool = True
    # The speculation bucket is chosen above cached and new tokens; 0.1: above cached ones.
    bucket_holds_speculation: bool = True

    # -- continuous batching -----------------------------------------------------------------

    # Decode sorts its rows by sequence id in the graph, so any order of them is right. Later the
    # wrapper sorts them, and a whole batch not even there.
    graph_sorts_rows: bool = False
    # A prefill graph writes one cache line, so `ctx_batch_size` has to be 1.
    prefills_one_line: bool = True
    # Rows that fill a decode batch write at position 0 of lines that the call leaves out. So in
    # 0.1.0; from 0.1.1 on they repeat the first row, at its position.
    idle_rows_are_zeros: bool = False

    # -- layers and attention --------------------------------------------------------------------

    # Layers get `rotary_position_ids`, `local_mask`, cache keywords and a `residual`, and return
    # five items instead of four. Projections and attention hand the residual on as one more result.
    passes_residual: bool = True
    # `get_model_output` reads and writes the cache itself.
    body_updates_cache: bool = True
    # `NeuronAttentionBase(config, *, hidden_size, ...)` builds its own projections, and its
    # `forward` accepts keywords that its signature does not name.
    attention_takes_config: bool = True
    # Attention refuses a head_dim that is not hidden_size / heads.
    heads_fill_hidden_size: bool = False
    # `generate` hands on its configuration's top_k, top_p and temperature, whatever
    # `sampling_params` it was given.
    generate_names_draws: bool = True
    # `output_logits` gives both; before they are a list, which nothing reads.
    gives_tokens_and_logits: bool = True
    # Sampling parameters may be a temperature of 0 or a `top_k` of 0.
    takes_zeros: bool = True
    # The last columns of the logits, as many as pad a sharded head, are the least number. That is
    # the padding where each rank has its own columns. Where they are gathered and cut, real tokens
    # are hidden. 0.1 hides nothing, so zeros of the padding may be chosen.
    masks_padded_vocabulary: bool = True
    # A graph compiled for top_k = 1 takes the arg-maximum, though `do_sample` is set.
    samples_above_top_1_only: bool = False

    @property
    def layer_inputs(self) -> dict[str, int | None]:
        """Graph inputs that every layer gets, each with its value where a graph has none."""
        later = _OF_EXPERTS if self.version == EXPERTS else {}
        return {} if self.version == FIRST else _OF_LAYERS | later

    @property
    def physical_cores(self) -> int:
        """Cores of a logical core: in 0.9 two where the environment says so, else one."""
        chip = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")
        return 2 if self.version == EXPERTS and chip in ("trn2", "trn3") else 1

    def has_field(self, name: str) -> bool:
        """Whether NeuronConfig has the attribute `name`; True for a name outside of the table."""
        return self.version in _FIELDS.get(name, (self.version,))


CONTRACTS = {
    FIRST: Contract(
        version=FIRST,
        async_keyword="async",
        **{row.name: not row.default for row in fields(Contract) if row.type is bool},
    ),
    LATER: Contract(),
    EXPERTS: Contract(version=EXPERTS),
}


def field_versions(name: str) -> str:
    """The libraries in which NeuronConfig has the attribute `name`; "" outside of the table."""
    return " and ".join(_FIELDS.get(name, ()))


_thread = threading.local()


def building_under(contract: Contract) -> AbstractContextManager[None]:
    """Inside the block, what this thread builds follows `contract`. Projections, samplers and the
    attention of NxDI 0.1 get no configuration: the block tells them."""
    return within(_thread, contract=contract)


def contract(default: str = FIRST) -> Contract:
    """The contract of the model under construction, else the environment's, else that of the
    library `default`. StandInError where the environment names none of CONTRACTS."""
    building = getattr(_thread, "contract", None)
    if building is not None:
        return building
    version = os.environ.get(ENVIRONMENT_VARIABLE, "") or default
    if version not in CONTRACTS:
        raise StandInError(
            f"{ENVIRONMENT_VARIABLE} names NxDI {version!r}, which has no imitation here, expected "
            f"one of {', '.join(CONTRACTS)}; unset it, or name checkouts of the release itself "
            "with --libraries or NEURON_CPU_LIBRARIES (docs/libraries.md)."
        )
    return CONTRACTS[version]
