"""Forms of the SDK that public contest entries use, each in a model of its own, against Llama.

Every model below replaces a part of the baseline by code written the way entries write it: linear
classes behind `_forward_impl`, projections swapped inside the attention, hooks of the attention of
NxDI 0.1, 0.3 and 0.4, kernels stored in a class, results assembled in place.
"""

import importlib
import math

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import pytest
import torch
import torch.nn.functional as F
from neuronx_distributed.parallel_layers import utils
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    LinearWithAsyncCommunication,
    RowParallelLinear,
)
from neuronx_distributed.parallel_layers.mappings import (
    _gather_along_dim,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region_tiled,
    scatter_to_tensor_model_parallel_region,
)
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_group
from neuronx_distributed_inference.models.llama import modeling_llama as baseline
from neuronx_distributed_inference.modules.attention.attention_base import (
    FlashAttentionStrategy,
    NeuronAttentionBase,
    _flash_fwd_call,
)
from neuronx_distributed_inference.modules.attention.gqa import (
    GroupQueryAttention_O,
    GroupQueryAttention_QKV,
)
from neuronx_distributed_inference.modules.attention.utils import (
    RotaryEmbedding,
    manual_softmax,
    repeat_kv,
    transpose_parallel_linear_layer,
)
from neuronx_distributed_inference.modules.eagle.utils import tiled_all_gather_matmul
from neuronx_distributed_inference.utils.distributed import get_tp_group
from torch import nn
from transformers.activations import ACT2FN

from neuron_cpu.runtime.ranks import RankPool
from tests import greedy
from tests.crossed import crossed

PROMPTS = [[7, 3, 9, 11, 200, 45, 6], [5, 6, 7]]
BATCH = dict(batch_size=2)


def multiply(lhs_t_hbm, rhs_hbm):
    """(K, M), (K, N) -> lhs.T @ rhs (M, N), with K <= 128, N <= 512, M <= 128 or a multiple."""
    count, width = lhs_t_hbm.shape[1], rhs_hbm.shape[1]
    out_hbm = nl.ndarray((count, width), dtype=lhs_t_hbm.dtype, buffer=nl.shared_hbm)
    rhs = nl.load(rhs_hbm)
    tile = min(count, 128)
    for i in nl.affine_range(count // tile):
        rows = nl.ds(i * tile, tile)
        product = nl.matmul(nl.load(lhs_t_hbm[:, rows]), rhs, transpose_x=True)
        nl.store(out_hbm[rows, :], nl.copy(product, dtype=lhs_t_hbm.dtype))
    return out_hbm


multiply_kernel = nki.jit(multiply)


def kernel_linear(x, weight_t):
    """x (..., K) @ weight_t (K, N) in the kernel."""
    rows = x.reshape(-1, x.shape[-1])
    return multiply_kernel(rows.t(), weight_t).reshape(*x.shape[:-1], weight_t.shape[1])


# What the top of public entries and drivers imports, by module; most of it behind switches.
IMPORTS = {
    "neuronx_distributed": "parallel_layers",
    "neuronx_distributed.parallel_layers": "parallel_state utils",
    "neuronx_distributed.parallel_layers.layers": "BaseParallelLinear ColumnParallelLinear "
    "LinearWithAsyncCommunication ParallelEmbedding RowParallelLinear SPMDRank "
    "_initialize_parameter_cpu linear_with_async_allreduce",
    "neuronx_distributed.parallel_layers.mappings": "_gather_along_dim _gather_along_first_dim "
    "_reduce_scatter_along_dim copy_to_tensor_model_parallel_region "
    "gather_from_sequence_parallel_region gather_from_tensor_model_parallel_region "
    "gather_from_tensor_model_parallel_region_with_dim reduce_from_tensor_model_parallel_region "
    "reduce_scatter_to_sequence_parallel_region scatter_to_tensor_model_parallel_region "
    "reduce_scatter_to_sequence_parallel_region_tiled "
    "scatter_input_channels_to_tensor_model_parallel_region",
    "neuronx_distributed.parallel_layers.parallel_state": "get_aot_mode get_kv_shared_group "
    "get_tensor_model_parallel_group get_tensor_model_parallel_rank get_tensor_model_parallel_size "
    "model_parallel_is_initialized",
    "neuronx_distributed.parallel_layers.utils": "EmbeddingUtility cast_if_autocast_enabled divide "
    "get_padding_length is_torch_version_greater_than_2 set_tensor_model_parallel_attributes "
    "verify_casted_dtype",
    "neuronx_distributed.quantization.quantization_config": "QuantizationType QuantizedDtype",
    "neuronx_distributed.quantization.quantization_layers": "QuantizedColumnParallel "
    "QuantizedRowParallel",
    "neuronx_distributed.utils": "cpu_mode",
    "neuronx_distributed_inference.models.config": "InferenceConfig NeuronConfig "
    "OnDeviceSamplingConfig to_torch_dtype",
    "neuronx_distributed_inference.models.llama.modeling_llama": "NeuronLlamaForCausalLM",
    "neuronx_distributed_inference.models.model_base": "NeuronBaseForCausalLM NeuronBaseModel",
    "neuronx_distributed_inference.modules.attention.attention_base": "FlashAttentionStrategy "
    "NeuronAttentionBase",
    "neuronx_distributed_inference.modules.attention.gqa": "BaseGroupQueryAttention GQA "
    "GroupQueryAttention_O GroupQueryAttention_QKV",
    "neuronx_distributed_inference.modules.attention.utils": "RotaryEmbedding apply_rotary_pos_emb "
    "distributed_softmax manual_softmax move_heads_front preprocess_quantized_linear_layer "
    "repeat_kv transpose_parallel_linear_layer",
    "neuronx_distributed_inference.modules.custom_calls": "CustomRMSNorm",
    "neuronx_distributed_inference.modules.flashdecode.utils": "calculate_num_cores_per_group",
    "neuronx_distributed_inference.modules.generation.sampling": "prepare_sampling_params",
    "neuronx_distributed_inference.modules.lora_serving.lora_module": "is_lora_module",
    "neuronx_distributed_inference.utils.accuracy": "get_generate_outputs",
    "neuronx_distributed_inference.utils.benchmark": "BENCHMARK_REPORT_FILENAME Benchmark "
    "create_submodule_latency_collectors generate_report "
    "register_latency_collectors",
    "neuronx_distributed_inference.utils.distributed": "get_tp_group",
    "neuronx_distributed_inference.utils.hf_adapter": "HuggingFaceGenerationAdapter "
    "load_pretrained_config",
    "neuronx_distributed_inference.utils.random": "set_random_seed",
    "neuronxcc.nki": "jit",
    "neuronxcc.nki._private_kernels.attention": "attention_isa_kernel",
    "neuronxcc.nki._private_kernels.mlp": "mlp_fused_add_isa_kernel mlp_isa_kernel "
    "quant_mlp_fused_add_isa_kernel quant_mlp_isa_kernel",
    "neuronxcc.nki._private_kernels.rmsnorm": "rmsnorm_quant_isa_kernel",
    "neuronxcc.nki.compiler": "skip_middle_end_transformations",
    "neuronxcc.nki.isa": "nc_matmul",
    "neuronxcc.nki.language": "nc par_dim",
    "neuronxcc.nki.typing": "mutable tensor",
    "neuronxcc.starfish.penguin.targets.nki.private_api": "vnc",
    "torch_neuronx.pyhlo.hlo_pb2": "HloModuleProto",
    "torch_neuronx.testing.validation": "logit_validation",
    "torch_neuronx.xla_impl.ops": "RmsNorm nki_jit",
    "torch_neuronx.utils": "get_platform_target",
    "torch_xla": "core device sync",
    "torch_xla.core.xla_model": "REDUCE_SUM mark_step",
}


@pytest.mark.parametrize("module", IMPORTS)
def test_names_at_the_top_of_entries(module):
    found = importlib.import_module(module)
    assert not [name for name in IMPORTS[module].split() if not hasattr(found, name)]


# -- linear layers ------------------------------------------------------------------------------


class KernelLinear(LinearWithAsyncCommunication):
    """The class that entries hand to `_forward_impl`, with the context's fields filled in."""

    @staticmethod
    def forward(
        ctx,
        input,
        weight,
        bias,
        async_grad_allreduce,
        sequence_parallel_enabled,
        sequence_dimension=0,
        save_for_backward=True,
        process_group=None,
        reduce_dtype=torch.float32,
    ):
        ctx.use_bias = bias is not None and weight.requires_grad
        ctx.async_grad_allreduce = async_grad_allreduce
        ctx.process_group = process_group or get_tensor_model_parallel_group(as_list=True)
        ctx.reduce_dtype = reduce_dtype
        if save_for_backward:
            ctx.save_for_backward(weight)
        if sequence_parallel_enabled:
            input = _gather_along_dim(input, sequence_dimension, process_group=ctx.process_group)
        output = kernel_linear(input, weight.t())
        return output if bias is None else output + bias


class ForwardImplColumn(ColumnParallelLinear):
    """The layer's own forward, written out, with another class in `_forward_impl`."""

    def forward(self, input, *_):
        if self.pad and self.training:
            raise RuntimeError("pad=True is for inference")
        if not (self.async_tensor_model_parallel_allreduce or self.sequence_parallel_enabled):
            input = copy_to_tensor_model_parallel_region(
                input, process_group=self.tensor_parallel_group
            )
        output = self._forward_impl(
            input=input,
            weight=self.weight,
            bias=None,
            async_grad_allreduce=self.async_tensor_model_parallel_allreduce,
            sequence_parallel_enabled=self.sequence_parallel_enabled,
            sequence_dimension=self.sequence_dimension,
            autograd_func_class=KernelLinear,
            process_group=self.tensor_parallel_group,
            reduce_dtype=self.reduce_dtype,
        )
        if self.gather_output:
            output = gather_from_tensor_model_parallel_region(
                output, process_group=self.tensor_parallel_group
            )
            if self.pad and self.pad_size > 0:
                output = torch.narrow(output, -1, 0, self.output_size - self.pad_size)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias


class ForwardImplRow(RowParallelLinear):
    def forward(self, input_):
        if not self.input_is_parallel:
            if self.pad and self.pad_size > 0:
                input_ = F.pad(input_, (0, self.pad_size))
            input_ = scatter_to_tensor_model_parallel_region(
                input_, process_group=self.tensor_parallel_group
            )
        output = self._forward_impl(
            input=input_,
            weight=self.weight,
            bias=None,
            async_grad_allreduce=False,
            sequence_parallel_enabled=False,
            sequence_dimension=self.sequence_dimension,
            autograd_func_class=KernelLinear,
            process_group=self.tensor_parallel_group,
        )
        if self.reduce_output:
            original = output.dtype
            output = output.to(self.reduce_dtype)
            if self.sequence_parallel_enabled:
                output = reduce_scatter_to_sequence_parallel_region(
                    output, self.sequence_dimension, process_group=self.tensor_parallel_group
                )
            else:
                output = reduce_from_tensor_model_parallel_region(
                    output, process_group=self.tensor_parallel_group
                )
            output = output.to(original)
        return output if self.bias is None else output + self.bias


class AttributeColumn(ColumnParallelLinear):
    autograd_func_class = KernelLinear


class AttributeRow(RowParallelLinear):
    autograd_func_class = KernelLinear


class TransposedColumn(ColumnParallelLinear):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight = transpose_parallel_linear_layer(self.weight)

    def forward(self, input, *_):
        output = kernel_linear(input, self.weight)
        return output if self.bias is None else output + self.bias


class TransposedRow(RowParallelLinear):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight = transpose_parallel_linear_layer(self.weight)

    def forward(self, input_):
        output = reduce_from_tensor_model_parallel_region(kernel_linear(input_, self.weight))
        return output if self.bias is None else output + self.bias


LINEARS = {
    "forward_impl": (ForwardImplColumn, ForwardImplRow),
    "attribute": (AttributeColumn, AttributeRow),
    "transposed": (TransposedColumn, TransposedRow),
}


# -- MLP ----------------------------------------------------------------------------------------


class NeuronLlamaMLP(nn.Module):
    """One of LINEARS, or a kernel of the class over weights that the first call transposes."""

    product = nki.jit(multiply)

    def __init__(self, config, form):
        super().__init__()
        self.form, self.config = form, config
        self.act_fn = ACT2FN[config.hidden_act]
        column, row = LINEARS.get(form, (ColumnParallelLinear, RowParallelLinear))
        sizes = (config.hidden_size, config.intermediate_size)
        self.sequence_parallel_enabled = config.neuron_config.sequence_parallel_enabled
        self.sequence_dimension = 1 if self.sequence_parallel_enabled else None
        common = dict(
            bias=getattr(config, "mlp_bias", False),
            dtype=config.neuron_config.torch_dtype,
            pad=True,
            tensor_model_parallel_group=get_tp_group(config),
        )
        whole = dict(sequence_parallel_enabled=False, sequence_dimension=None)
        self.gate_proj = column(*sizes, gather_output=False, **common, **whole)
        self.up_proj = column(*sizes, gather_output=False, **common, **whole)
        self.down_proj = row(
            *sizes[::-1],
            input_is_parallel=True,
            reduce_dtype=config.neuron_config.rpl_reduce_dtype,
            sequence_parallel_enabled=self.sequence_parallel_enabled,
            sequence_dimension=self.sequence_dimension,
            **common,
        )

    def forward(self, x, rmsnorm=None, residual=None, adapter_ids=None):
        if self.sequence_parallel_enabled:
            x = gather_from_sequence_parallel_region(x, self.sequence_dimension)
        if self.form == "in_place":
            return self._in_place(x), None
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)), None

    def _in_place(self, x):
        """Row by row of the batch into a tensor made before, through the class's kernel."""
        if not hasattr(self, "_gate_t"):
            self._gate_t = self.gate_proj.weight.permute(1, 0).contiguous()
            self._up_t = self.up_proj.weight.permute(1, 0).contiguous()
            self._down_t = self.down_proj.weight.permute(1, 0).contiguous()
        output = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        for row in range(x.shape[0]):
            row_t = x[row].transpose(0, 1)
            hidden = self.act_fn(self.product(row_t, self._gate_t))
            hidden = hidden * self.product(row_t, self._up_t)
            output[row] = self.product(hidden.transpose(0, 1), self._down_t)
        for row in range(x.shape[0]):
            output[row] = reduce_from_tensor_model_parallel_region(output[row])
        return output


# -- attention ----------------------------------------------------------------------------------


def own_prefill(attention, Q, K, V, q_len, bsz, attention_mask):
    """The base's prefill as entries copy it, with all of its branches."""
    K = repeat_kv(K, attention.num_key_value_groups)
    V = repeat_kv(V, attention.num_key_value_groups)
    strategy = attention.get_flash_attention_strategy(q_len)
    if strategy != FlashAttentionStrategy.NONE:
        assert strategy != FlashAttentionStrategy.SHARDED_KERNEL
        assert strategy == FlashAttentionStrategy.UNSHARDED_KERNEL
        output = torch.zeros_like(Q)
        _flash_fwd_call(Q, K, V, 1.0, output, kernel_name="CausalAttentionMMSoftmaxMMWithoutSwap")
        return output, strategy
    scores = attention.scaled_qk(Q, K, attention_mask)
    scores = F.softmax(scores, dim=-1, dtype=torch.float32).to(Q.dtype)
    return torch.matmul(scores, V), strategy


def own_decode(attention, Q, K, V, position_ids, past_key_value, attention_mask):
    """The base's decode as entries copy it."""
    groups = attention.num_key_value_groups
    K_prior, V_prior = (repeat_kv(past, groups) for past in past_key_value[:2])
    K, V = repeat_kv(K, groups), repeat_kv(V, groups)
    prior = torch.matmul(Q, K_prior.transpose(2, 3)) / math.sqrt(attention.head_dim)
    prior = torch.where(attention_mask, prior, torch.finfo(prior.dtype).min).to(torch.float32)
    active = torch.matmul(Q, K.transpose(2, 3)) / math.sqrt(attention.head_dim)
    prior, active = manual_softmax(prior, active.to(torch.float32), False)
    return torch.matmul(prior.to(Q.dtype), V_prior) + torch.matmul(active.to(Q.dtype), V)


class OwnQKV(GroupQueryAttention_QKV):
    """Projections replaced behind the base's back, and a kernel behind `qkv_kernel_enabled`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if self.fused_qkv or self.tensor_model_parallel_group is None:
            return
        heads = {"q_proj": self.num_attention_heads, "k_proj": self.num_key_value_heads}
        for name, count in {**heads, "v_proj": self.num_key_value_heads}.items():
            projection = ForwardImplColumn(
                self.hidden_size,
                count * self.head_dim,
                bias=self.bias,
                gather_output=self.gather_output,
                dtype=self.dtype,
                sequence_parallel_enabled=False,
                tensor_model_parallel_group=self.tensor_model_parallel_group,
            )
            setattr(self, name, projection)

    def _kernel_qkv_forward(self, hidden_states, fused_rmsnorm, rmsnorm):
        assert fused_rmsnorm and self.Wqkv.weight.shape[0] == self.hidden_size
        return self._split_fused_qkv(kernel_linear(rmsnorm(hidden_states), self.Wqkv.weight))


class OwnO(GroupQueryAttention_O):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.o_proj = ForwardImplRow(
            self.num_attention_heads * self.head_dim,
            self.hidden_size,
            bias=self.bias,
            input_is_parallel=self.input_is_parallel,
            dtype=self.dtype,
            sequence_parallel_enabled=self.sequence_parallel_enabled,
            sequence_dimension=self.sequence_dimension,
            tensor_model_parallel_group=self.tensor_model_parallel_group,
            reduce_dtype=self.rpl_reduce_dtype,
        )


class FirstAttention(NeuronAttentionBase):
    """NxDI 0.1: attributes, then an `init_gqa_properties` of its own."""

    def __init__(self, config, tensor_model_parallel_group=None):
        super().__init__(tensor_model_parallel_group=tensor_model_parallel_group)
        assert self.num_heads is None and self.o_proj is None and not self.qk_layernorm
        self.config, self.neuron_config = config, config.neuron_config
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = self.hidden_size // self.num_attention_heads
        self.padding_side = config.neuron_config.padding_side
        self.torch_dtype = config.neuron_config.torch_dtype
        self.rpl_reduce_dtype = config.neuron_config.rpl_reduce_dtype
        self.rms_norm_eps = config.rms_norm_eps
        self.tp_degree = config.neuron_config.tp_degree
        self.fused_qkv, self.clip_qkv = config.neuron_config.fused_qkv, None
        self.sequence_parallel_enabled = self.neuron_config.sequence_parallel_enabled
        self.sequence_dimension = 1 if self.sequence_parallel_enabled else None
        self.init_gqa_properties()
        self.rotary_emb = RotaryEmbedding(self.head_dim, base=config.rope_theta)

    def init_gqa_properties(self):
        common = dict(
            hidden_size=self.hidden_size,
            head_dim=self.head_dim,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            tp_degree=self.tp_degree,
            dtype=self.torch_dtype,
            bias=self.bias,
            sequence_parallel_enabled=self.sequence_parallel_enabled,
            sequence_dimension=self.sequence_dimension,
            tensor_model_parallel_group=self.tensor_model_parallel_group,
        )
        self.qkv_proj = OwnQKV(
            gather_output=False,
            fused_qkv=self.fused_qkv,
            clip_qkv=self.clip_qkv,
            rms_norm_eps=self.rms_norm_eps,
            qkv_kernel_enabled=self.neuron_config.qkv_kernel_enabled,
            logical_neuron_cores=self.neuron_config.logical_neuron_cores,
            **common,
        )
        self.o_proj = OwnO(
            input_is_parallel=True,
            layer_name=self.o_proj_layer_name,
            rpl_reduce_dtype=self.rpl_reduce_dtype,
            **common,
        )
        self.num_heads = utils.divide(self.qkv_proj.get_num_attention_heads(), self.tp_degree)
        self.num_key_value_heads = utils.divide(
            self.qkv_proj.get_num_key_value_heads(), self.tp_degree
        )
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.attn_kernel_enabled = self.neuron_config.attn_kernel_enabled
        self.logical_neuron_cores = self.neuron_config.logical_neuron_cores

    def perform_prefill(self, Q, K, V, q_len, bsz, attention_mask):
        return own_prefill(self, Q, K, V, q_len, bsz, attention_mask)

    def compute_for_token_gen(
        self, Q, K, V, position_ids, past_key_value, attention_mask, active_mask
    ):
        return own_decode(self, Q, K, V, position_ids, past_key_value, attention_mask)


class ThirdAttention(baseline.NeuronLlamaAttention):
    """NxDI 0.3: a `forward` that takes the cache keywords and hands them to the base.

    Projections are replaced after the base has made them; the result unpacks as four items.
    """

    def __init__(self, config, tensor_model_parallel_group=None):
        super().__init__(config, tensor_model_parallel_group)
        qkv = self.qkv_proj
        qkv.q_proj = TransposedColumn(
            qkv.hidden_size,
            qkv.num_attention_heads * qkv.head_dim,
            bias=qkv.bias,
            gather_output=qkv.gather_output,
            dtype=self.torch_dtype,
            sequence_parallel_enabled=False,
            tensor_model_parallel_group=qkv.tensor_model_parallel_group,
        )
        self.o_proj.o_proj = TransposedRow(
            self.o_proj.num_attention_heads * self.o_proj.head_dim,
            self.o_proj.hidden_size,
            bias=self.o_proj.bias,
            input_is_parallel=self.o_proj.input_is_parallel,
            dtype=self.torch_dtype,
            sequence_parallel_enabled=False,
            sequence_dimension=self.sequence_dimension,
            tensor_model_parallel_group=self.o_proj.tensor_model_parallel_group,
            reduce_dtype=self.rpl_reduce_dtype,
        )

    def forward(self, hidden_states, attention_mask=None, seq_ids=None, **kwargs):
        output, past, cos, sin = super().forward(
            hidden_states=hidden_states, attention_mask=attention_mask, seq_ids=seq_ids, **kwargs
        )
        return output, past, cos, sin


# -- models -------------------------------------------------------------------------------------


class NeuronLlamaDecoderLayer(nn.Module):
    """Four results up to NxDI 0.2; five later, the last one a residual already added."""

    def __init__(self, config, attention, mlp_form):
        super().__init__()
        self.fused_norm = config.neuron_config.qkv_kernel_enabled
        self.self_attn = attention(config, tensor_model_parallel_group=get_tp_group(config))
        self.mlp = NeuronLlamaMLP(config, mlp_form)
        norm = baseline.get_rmsnorm_cls()
        self.input_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, residual="not passed", **kwargs):
        entry = hidden_states
        if not self.fused_norm:
            hidden_states = self.input_layernorm(hidden_states)
        attended = self.self_attn(hidden_states, rmsnorm=self.input_layernorm, **kwargs)
        hidden_states, present, cos, sin = attended
        middle = entry + hidden_states
        hidden_states = (
            middle
            + self.mlp(
                self.post_attention_layernorm(middle), rmsnorm=self.post_attention_layernorm
            )[0]
        )
        outputs = (hidden_states, present, cos, sin)
        return outputs if isinstance(residual, str) else (*outputs, middle)


class DeferringLayer(NeuronLlamaDecoderLayer):
    """Leaves its last addition to the next layer, as `qkv_kernel_fuse_residual_add` asks."""

    def forward(self, hidden_states, residual=None, **kwargs):
        entry = hidden_states if residual is None else residual + hidden_states
        attended = self.self_attn(self.input_layernorm(entry), **kwargs)
        middle = entry + attended.hidden_states
        hidden_states, _ = self.mlp(self.post_attention_layernorm(middle))
        return (hidden_states, *list(attended)[1:], middle)


def model_class(
    attention=baseline.NeuronLlamaAttention, mlp="plain", layer=NeuronLlamaDecoderLayer
):
    """The baseline with layers of the given forms; its own switches for closed kernels allowed."""

    class Model(baseline.NeuronLlamaModel):
        def init_model(self, config):
            super().init_model(config)
            self.layers = nn.ModuleList(
                [layer(config, attention, mlp) for _ in range(config.num_hidden_layers)]
            )

    class Application(baseline.NeuronLlamaForCausalLM):
        _model_cls = Model

        @classmethod
        def validate_config(cls, config):
            super(baseline.NeuronLlamaForCausalLM, cls).validate_config(config)

    return Application


@pytest.fixture
def agrees(tiny_llama, application):
    """Compiles a model class and compares its greedy tokens with Hugging Face's."""

    def check(model_cls, shape=None, **neuron):
        model, folder = tiny_llama(**(shape or {}))
        app = application(folder, model_cls=model_cls, **BATCH, **neuron)
        greedy.assert_equal(app, model, PROMPTS, 5)
        return app

    return check


@pytest.mark.parametrize(
    ("form", "tp_degree", "version"), crossed([*LINEARS, "in_place"], [1, 2], ["0.1", "0.6"])
)
def test_forms_of_the_mlp(agrees, monkeypatch, form, tp_degree, version):
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    shape = dict(mlp_bias=True) if form in LINEARS else {}
    agrees(model_class(mlp=form), shape, tp_degree=tp_degree)


@pytest.mark.parametrize(("attention_bias", "tp_degree"), crossed([False, True], [1, 2]))
def test_attention_of_nxdi_0_1(agrees, tp_degree, attention_bias):
    agrees(model_class(FirstAttention), dict(attention_bias=attention_bias), tp_degree=tp_degree)


@pytest.mark.parametrize("tp_degree", [1, 2])
def test_an_own_kernel_behind_qkv_kernel_enabled(agrees, tp_degree):
    """The switch selects the entry's `_kernel_qkv_forward`, which norms by itself."""
    options = dict(fused_qkv=True, qkv_kernel_enabled=True, tp_degree=tp_degree)
    agrees(model_class(FirstAttention), **options)


def test_attention_of_later_releases(agrees, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    agrees(model_class(ThirdAttention), tp_degree=2)


def test_a_layer_may_leave_its_last_addition_to_the_next(agrees, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    agrees(model_class(layer=DeferringLayer), qkv_kernel_fuse_residual_add=True)


# -- refusals -----------------------------------------------------------------------------------

LONG = dict(seq_len=520, max_context_length=512)


@pytest.mark.parametrize(
    ("model_cls", "options", "message"),
    [
        (
            model_class(),
            dict(fused_qkv=True, qkv_kernel_enabled=True),
            "rmsnorm_qkv_isa_kernel is a closed kernel",
        ),
        (model_class(), dict(attn_kernel_enabled=True, **LONG), "attention_isa_kernel is a closed"),
        (
            model_class(FirstAttention),
            dict(attn_kernel_enabled=True, **LONG),
            "attention_isa_kernel is a closed kernel",
        ),
        (
            baseline.NeuronLlamaForCausalLM,
            dict(attn_kernel_enabled=True),
            "NeuronConfig.attn_kernel_enabled is not supported",
        ),
    ],
)
def test_closed_kernels_are_refused_by_name(tiny_llama, application, model_cls, options, message):
    _, folder = tiny_llama()
    with pytest.raises(NotImplementedError, match=message):
        application(folder, load=False, model_cls=model_cls, **options)


def test_qkv_kernel_without_fused_weights_is_refused(tiny_llama, application):
    _, folder = tiny_llama()
    with pytest.raises(AssertionError, match="qkv_kernel_enabled needs fused_qkv=True"):
        application(folder, load=False, model_cls=model_class(), qkv_kernel_enabled=True)


@pytest.mark.parametrize("name", ["neuronxcc.nki.kernels", "neuronxcc.nki.kernels.attention"])
def test_open_kernels_of_the_sdk_are_left_out_and_the_call_says_so(name):
    kernel = importlib.import_module(name).flash_fwd
    with pytest.raises(NotImplementedError, match="flash_fwd is a closed kernel.*nki-samples"):
        kernel[1, 2](torch.zeros(1))


def test_settings_of_closed_kernels_are_made_where_files_are_imported():
    module = importlib.import_module("neuronxcc.nki._pre_prod_kernels.collectives")
    assert "CollectivesConfig" in repr(module.CollectivesConfig(replica_groups=[[0, 1]]))
    assert not hasattr(module, "__wrapped__")


def test_helpers_of_other_features_are_refused():
    with pytest.raises(NotImplementedError, match="tiled_all_gather_matmul belongs to"):
        tiled_all_gather_matmul(torch.zeros(1), torch.zeros(1), tp_degree=2)


def test_attention_arguments_that_would_not_happen_are_refused(tiny_llama, application):
    class Windowed(baseline.NeuronLlamaAttention):
        def __init__(self, config, tensor_model_parallel_group=None):
            NeuronAttentionBase.__init__(
                self,
                config,
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                sliding_window=16,
            )

    _, folder = tiny_llama()
    with pytest.raises(NotImplementedError, match="got sliding_window=16, expected None"):
        application(folder, load=False, model_cls=model_class(Windowed))


@pytest.mark.parametrize(
    ("version", "attention", "error", "mend"),
    [
        ("0.1", ThirdAttention, TypeError, "takes no keywords .*NEURON_CPU_NXDI to 0.6"),
        ("0.6", FirstAttention, TypeError, "needs the config .*NEURON_CPU_NXDI to 0.1"),
    ],
)
def test_files_of_another_version_are_told_which_to_set(
    tiny_llama, application, monkeypatch, version, attention, error, mend
):
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    _, folder = tiny_llama()
    with pytest.raises(error, match=mend):
        application(folder, load=False, model_cls=model_class(attention))


# -- layers by themselves -----------------------------------------------------------------------


def on_ranks(size, function):
    """Results of `function()` on every rank of a group."""
    return RankPool(size).run([function] * size)


def test_replica_groups_name_the_group():
    def run():
        groups = get_tensor_model_parallel_group(as_list=True)
        return _gather_along_dim(torch.ones(1), 0, process_group=groups)

    assert [result.tolist() for result in on_ranks(2, run)] == [[1, 1], [1, 1]]
    with pytest.raises(ValueError, match=r"expected \[\[0\]\], the only replica groups"):
        on_ranks(1, lambda: _gather_along_dim(torch.ones(1), 0, process_group=[[0, 1]]))


def test_tiled_reduce_scatter_is_the_plain_one():
    x = torch.arange(16.0).reshape(1, 4, 4)

    def run():
        return reduce_scatter_to_sequence_parallel_region_tiled(x, 1)

    torch.testing.assert_close(torch.cat(on_ranks(2, run), dim=1), 2 * x)


class LongRanks(baseline.NeuronLlamaForCausalLM):
    """The conversion of NxDI 0.1 and 0.2, whose rank tensors have torch.arange's own type."""

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict, config):
        converted = baseline.NeuronLlamaForCausalLM.convert_hf_to_neuron_state_dict(
            state_dict, config
        )
        ranks = [key for key in converted if key.endswith("rank_util.rank")]
        assert "embed_tokens.rank_util.rank" in ranks
        return converted | {key: converted[key].long() for key in ranks}


def test_rank_tensors_of_64_bits(agrees):
    options = dict(vocab_parallel=True, save_sharded_checkpoint=False)
    agrees(LongRanks, tp_degree=2, **options)


def test_functions_that_take_xla_can_be_scripted():
    """NxD 0.10 scripts a function of its own that makes a tensor."""
    import torch_xla  # noqa: F401 - wraps torch.tensor

    scripted = torch.jit.CompilationUnit("def f(x):\n    return x + torch.tensor([1.0])\n")
    assert scripted.f(torch.ones(1)).item() == 2.0
    assert torch.jit._builtins._find_builtin(torch.tensor) == "aten::tensor"


def test_the_device_by_its_name():
    """`device="xla"` and `.to("xla")` are the CPU, as `xla_device()` is."""
    importlib.import_module("torch_xla")
    made = [
        torch.ones((2, 3), device="xla"),
        torch.as_tensor([1, 2], device=torch.device("xla:0")),
        torch.ones(3).to(device="xla", dtype=torch.float16),
        nn.Linear(3, 2).to("xla")(torch.ones(1, 3).to("xla:0")),
    ]
    assert all(one.device.type == "cpu" for one in made) and made[2].dtype is torch.float16
    assert made[0].sum() == 6 and torch.ones(2).to(torch.float64).dtype is torch.float64
