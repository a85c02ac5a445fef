"""Configurations: `NeuronConfig` for the hardware run, `InferenceConfig` for the model.

`NeuronConfig` takes every field as a keyword; it logs and ignores an unknown one, as NxDI does.
`InferenceConfig` holds the Hugging Face configuration as attributes beside a `NeuronConfig`, and
saves both as `neuron_config.json`.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from neuron_cpu.closed import Closed
from neuron_cpu.errors import StandInError, nearest
from neuron_cpu.libraries import real_ones

from ..contract import ENVIRONMENT_VARIABLE, EXPERTS, FIRST, Contract, contract, field_versions
from ..small import FusedSpecNeuronConfig as FusedSpecNeuronConfig

CONFIG_FILE = "neuron_config.json"
FIRST_STEPS = (
    "write config = CLASS.get_config_cls()(CLASS.get_neuron_config_cls()(tp_degree=2, seq_len=128)"
    ", load_config=load_pretrained_config(FOLDER)), with the last from "
    "neuronx_distributed_inference.utils.hf_adapter, and CLASS(FOLDER, config)"
)
# Inner features of a rank's share of an expert that closed kernels need whole multiples of.
SHARD_ON_INTERMEDIATE_DIMENSION_PER_TP = SHARD_ON_INTERMEDIATE_DIMENTION_PER_TP = 256
MOE_TKG_MK_INTERMEDIATE_PER_TP = 128
# Features that this imitation leaves to the libraries themselves, by the option that asks for them.
_REAL_ONLY = {
    "lora_config": "a model with low-rank adapters",
    "is_block_kv_layout": "a cache of blocks",
    "is_prefix_caching": "a cache of shared prefixes",
    "chunked_prefill_config": "a prompt in chunks that sequences share",
    "is_chunked_prefill": "a prompt in chunks that sequences share",
    "sequence_parallel_enabled": "a sequence that ranks share",
    "flash_decoding_enabled": "a cache that ranks share by positions",
    "cp_degree": "a prompt that ranks share",
    "k_cache_transposed": "a transposed cache of keys",
    "enable_fused_speculation": "a draft in the target's graph",
    "enable_eagle_speculation": "an EAGLE draft",
    "is_eagle_draft": "an EAGLE draft",
    "token_tree_config": "a tree of guesses",
    "is_medusa": "a model with Medusa heads",
    "quantized": "quantised weights",
}
# Fields with a default that is a constant; a version may lack some (contract.py).
_CONSTANT = {
    "on_cpu output_logits is_continuous_batching enable_bucketing bucket_n_active_tokens "
    "vocab_parallel fused_qkv sequence_parallel_enabled qk_layernorm flash_decoding_enabled "
    "is_chunked_prefill quantized kv_cache_quant enable_eagle_speculation is_eagle_draft "
    "enable_fused_speculation "
    "enable_eagle_draft_input_norm is_medusa qkv_kernel_enabled mlp_kernel_enabled "
    "mlp_kernel_fuse_residual_add quantized_mlp_kernel_enabled "
    "rmsnorm_quantize_kernel_enabled apply_seq_ids_mask allow_input_truncation "
    "is_paged_attention is_block_kv_layout is_prefix_caching k_cache_transposed "
    "attn_tkg_builtin_kernel_enabled qkv_kernel_fuse_residual_add fused_rmsnorm_skip_gamma": False,
    "speculation_length medusa_speculation_length num_medusa_heads start_rank_id "
    "kv_cache_padding_size": 0,
    "batch_size tp_degree pp_degree ep_degree cp_degree": 1,
    "lora_config quantized_checkpoints_path medusa_tree target is_prefill_stage prefix_buckets "
    "chunked_prefill_config modules_to_not_convert activation_quantization_type "
    "token_tree_config kv_quant_config": None,
    "trace_tokengen_model": True,
    "seq_len": 128,
    "cc_pipeline_tiling_factor": 2,
    "quantized_kernel_lower_bound": 1200.0,
    "quantize_clamp_bound": float("inf"),
    "padding_side": "right",
    "cast_type": "config",
    "attn_cls": "NeuronLlamaAttention",
    "quantization_type": "per_tensor_symmetric",
    "quantization_dtype": "int8",
}
# What a sampling configuration takes besides do_sample.
_SAMPLING = {
    "top_k": 1,
    "top_p": 1.0,
    "temperature": 1.0,
    "dynamic": False,
    "deterministic": False,
    "global_topk": 256,
    "on_device_sampling_config": True,
}
# What a mixture of experts takes without a look at it: names and their default.
_OF_EXPERTS = {
    "moe_tp_degree moe_ep_degree": 1,
    "moe_mask_padded_tokens early_expert_affinity_modulation disable_numeric_cc_token "
    "attn_block_tkg_nki_kernel_enabled": False,
    "moe_fused_nki_kernel_enabled scratchpad_page_size": None,
}
# Fields whose default is another field.
_LIKE = {
    "seq_len": "n_active_tokens n_positions max_context_length max_length pa_block_size",
    "batch_size": "ctx_batch_size tkg_batch_size max_batch_size spec_batch_size pa_num_blocks",
}
logger = logging.getLogger("Neuron")


def refuse_real_only(options: Mapping[str, Any]) -> None:
    """NotImplementedError for an option that only the real libraries have."""
    for name, feature in _REAL_ONLY.items():
        asked = options.get(name) or 0
        if asked is True or asked not in (0, 1):
            raise NotImplementedError(
                f"NeuronConfig.{name} asks for {feature}, expected it to be off over this "
                f"imitation of the libraries; {real_ones()}, or leave it out."
            )


_DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
}


def to_torch_dtype(dtype_str: str) -> torch.dtype:
    """The torch dtype of a bare name such as "bfloat16"; ValueError for an unknown one."""
    if dtype_str not in _DTYPES:
        mend = nearest(dtype_str, _DTYPES, "write one of them")
        raise ValueError(f"Unknown dtype {dtype_str!r}, expected one of {sorted(_DTYPES)}; {mend}.")
    return _DTYPES[dtype_str]


def to_dict(obj: Any) -> Any:
    """`obj` as JSON-ready data: an object becomes its attributes, a dtype its bare name. The
    contract is left out: it belongs to the process that reads the data."""
    if isinstance(obj, torch.dtype):
        return str(obj).split(".")[1]
    if isinstance(obj, dict):
        return {str(key): to_dict(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [to_dict(value) for value in obj]
    if isinstance(obj, (enum.Enum, Closed)):
        return obj.name if isinstance(obj, enum.Enum) else obj.__name__
    if isinstance(obj, type):
        return f"{obj.__module__}.{obj.__qualname__}"
    if hasattr(obj, "__dict__") and not callable(obj):
        return {k: to_dict(v) for k, v in vars(obj).items() if not isinstance(v, Contract)}
    return obj


def _as_dtype(value: str | torch.dtype) -> torch.dtype:
    return to_torch_dtype(value) if isinstance(value, str) else value


class OnDeviceSamplingConfig:
    """The way in which the device chooses tokens. Unknown keywords are ignored."""

    __slots__ = ("__dict__", "draws_by_default")  # the second one is in no saved file

    def __init__(self, **kwargs: Any) -> None:
        self.draws_by_default = "do_sample" not in kwargs
        for name, default in {"do_sample": contract().samples_by_default, **_SAMPLING}.items():
            setattr(self, name, kwargs.get(name, default))


class NeuronConfig:
    """Shapes, parallelism and features of one compiled model; every field is a keyword. `contract`
    is the NxDI version of the configuration and of all that is built for it."""

    library = FIRST  # that it stands for where the environment names none

    def __init__(self, **kwargs: Any) -> None:
        refuse_real_only(kwargs)
        for name, value in kwargs.items():
            if isinstance(value, str) and re.fullmatch(r"(?i)true|false|[\d.]+", value):
                raise StandInError(
                    f"{name} is the text {value!r}, expected a value of Python; write "
                    f"{name}={value.capitalize()}."
                )
        take = kwargs.pop
        self.contract = contract(self.library)
        for names, default in _CONSTANT.items():
            for name in names.split():
                self._optional(take, name, default)
        for source, likes in _LIKE.items():
            for name in likes.split():
                setattr(self, name, take(name, getattr(self, source)))
        self._set_shapes(take)
        self._set_features(take)
        self._set_parallelism(take)
        self._set_kernels(take)
        unknown = sorted(name for name in kwargs if not self._subclass_reads(name))
        if unknown:
            mend = nearest(unknown[0], vars(self), "leave it out")
            logger.warning("NeuronConfig ignores unknown keywords: %s; %s", unknown, mend)
        self._check()

    def _subclass_reads(self, keyword: str) -> bool:
        """Whether a subclass's constructor names `keyword` and may take it later."""
        before = type(self).__mro__[: type(self).__mro__.index(NeuronConfig)]
        constructors = [vars(cls).get("__init__") for cls in before]
        return any(keyword in c.__code__.co_consts for c in constructors if c is not None)

    def _optional(self, take: Callable[..., Any], name: str, default: Any) -> None:
        """Set a field that only some versions have; elsewhere its keyword stays unknown."""
        if self.contract.has_field(name):
            setattr(self, name, take(name, default))

    def __getattr__(self, name: str) -> Any:
        """AttributeError for an attribute that is not set, with the versions that have it.

        `logical_neuron_cores`, 0.1's name of `logical_nc_config`, can still be read in later
        versions. Later methods are found here too, so that hasattr tells a version's truth.
        """
        if name == "logical_neuron_cores":
            return self.logical_nc_config
        if name == "is_mlp_quantized" and self.contract.has_field(name):
            return self._is_mlp_quantized
        sentence = f"{type(self).__name__!r} has no attribute {name!r}"
        versions = field_versions(name)
        if versions:
            sentence += (
                f" in NxDI {self.contract.version}, expected only in {versions}; read it with "
                f"getattr and a default, or set {ENVIRONMENT_VARIABLE} to {versions.split()[0]}"
            )
        raise AttributeError(f"{sentence}.")

    def _is_mlp_quantized(self) -> Any:
        """Whether weights or activations of the MLP are quantised (NxDI 0.6)."""
        return self.quantized_mlp_kernel_enabled or self.activation_quantization_type

    def _set_shapes(self, take: Callable[..., Any]) -> None:
        """Batch, number formats, lengths and those for which graphs are built."""
        dtype = take("torch_dtype", None)
        self.overrides_torch_dtype = take("overrides_torch_dtype", dtype is not None)
        self.torch_dtype = torch.bfloat16 if dtype is None else _as_dtype(dtype)
        default_reduce = self.torch_dtype if self.contract.reduces_in_model_dtype else None
        reduce_dtype = take("rpl_reduce_dtype", default_reduce)
        self.rpl_reduce_dtype = None if reduce_dtype is None else _as_dtype(reduce_dtype)
        if getattr(self, "cast_type", "config") not in ("config", "as-declared"):
            raise ValueError(f"cast_type is {self.cast_type!r}, expected config or as-declared.")
        self.max_new_tokens = take("max_new_tokens", self.seq_len - self.max_context_length) or None
        self._optional(take, "kv_cache_batch_size", self.max_batch_size)
        self.buckets = take("buckets", [self.seq_len])
        self.context_encoding_buckets = self._bucket_list(
            take("context_encoding_buckets", None), self.max_context_length, "max_context_length"
        )
        self.token_generation_buckets = self._bucket_list(
            take("token_generation_buckets", None), self.max_length, "max_length"
        )

    @staticmethod
    def _bucket_list(buckets: list[int] | None, limit: int, name: str) -> list[int] | None:
        """Sorted buckets; an error where the last one exceeds the length it serves."""
        if buckets is None:
            return None
        buckets = sorted(buckets)
        if buckets[-1] > limit:
            raise AssertionError(f"Bucket {buckets[-1]} exceeds {name}, expected at most {limit}.")
        return buckets

    def _set_features(self, take: Callable[..., Any]) -> None:
        """Model-wide switches, and options for several tokens a step."""
        sampling = take("on_device_sampling_config", None)
        if isinstance(sampling, dict):
            sampling = OnDeviceSamplingConfig(**sampling)
        if getattr(sampling, "draws_by_default", False):
            sampling.do_sample = self.contract.samples_by_default
        self.on_device_sampling_config = sampling
        self.async_mode = take(self.contract.async_keyword, False)
        take("async_mode", None)  # 0.1 saves this name but reads the other
        if self.contract.has_field("token_tree_config"):
            self.enable_token_tree = self.token_tree_config is not None
            take("enable_token_tree", None)  # derived, but part of a saved file

    def _set_parallelism(self, take: Callable[..., Any]) -> None:
        """Ranks, and the files that are written for them."""
        world_size = take("world_size", None)
        self.world_size = world_size or self.tp_degree * self.pp_degree * self.ep_degree
        self.local_ranks_size = take("local_ranks_size", None) or self.world_size
        self.save_sharded_checkpoint = take(
            "save_sharded_checkpoint", self.contract.saves_sharded_checkpoint
        )

    def _set_kernels(self, take: Callable[..., Any]) -> None:
        """The SDK's private kernels and compiler flags. None of the kernels exists on the CPU."""
        self.kv_cache_tiling = False  # of fused speculation
        take("kv_cache_tiling", None)  # derived, but part of a saved file
        self.attn_kernel_enabled = take(
            "attn_kernel_enabled", None if self.contract.leaves_attention_kernel_open else False
        )
        asked = os.environ.get("NEURON_LOGICAL_NC_CONFIG") or self.contract.physical_cores
        cores = take("logical_neuron_cores", int(asked))
        if self.contract.has_field("logical_nc_config"):
            self.logical_nc_config = take("logical_nc_config", cores)
        else:
            self.logical_neuron_cores = cores
        self.weights_to_skip_layout_optimization = take("weights_to_skip_layout_optimization", [])

    def _check(self) -> None:
        """Refuse settings that exclude each other, or that the stand-in cannot honour."""
        if self.async_mode:
            logger.warning(
                "NeuronConfig.async_mode changes nothing over this imitation of NxD Inference: the "
                "text is the same, and a step begins when the one before it has ended."
            )
        if self.padding_side not in ("right", "left"):
            raise ValueError(f"padding_side must be 'right' or 'left', got {self.padding_side!r}.")
        if self.rmsnorm_quantize_kernel_enabled and not self.quantized_mlp_kernel_enabled:
            raise AssertionError(
                "rmsnorm_quantize_kernel_enabled needs quantized_mlp_kernel_enabled."
            )
        if self.contract.limits_context_length and self.max_context_length > self.max_length:
            raise AssertionError(
                f"max_context_length {self.max_context_length} exceeds max_length "
                f"{self.max_length}, expected at most that."
            )


class MoENeuronConfig(NeuronConfig):
    """NeuronConfig of a mixture of experts.

    `capacity_factor` None drops no tokens. `glu_mlp` gives experts a gate. The router's
    configuration has its activation and type. `block_size` of `blockwise_matmul_config` is
    the tokens of a block of a prompt's experts.
    """

    library = EXPERTS

    def __init__(
        self, capacity_factor: float | None = None, glu_mlp: bool = True, **kwargs: Any
    ) -> None:
        take = kwargs.pop
        self.capacity_factor = None if capacity_factor is None else float(capacity_factor)
        self.glu_mlp = glu_mlp
        for names, default in _OF_EXPERTS.items():
            for name in names.split():
                setattr(self, name, take(name, default))
        normalized = not take("disable_normalize_top_k_affinities", False)
        self.normalize_top_k_affinities = take("normalize_top_k_affinities", normalized)
        blockwise = take("blockwise_matmul_config", None) or {}
        if isinstance(blockwise, dict):
            blockwise = SimpleNamespace(**{"block_size": 512, **blockwise})
        self.blockwise_matmul_config = blockwise
        asked = {
            "act_fn": take("router_act_fn", "softmax"),
            "dtype": take("router_dtype", "float32"),
        }
        router = take("router_config", None)
        if not isinstance(router, SimpleNamespace):
            router = SimpleNamespace(**asked | (router or {}))
        router.dtype = _as_dtype(router.dtype)
        self.router_config = router
        super().__init__(**kwargs)
        if self.attn_block_tkg_nki_kernel_enabled and not self.qkv_kernel_enabled:
            raise AssertionError("attn_block_tkg_nki_kernel_enabled needs qkv_kernel_enabled.")


class InferenceConfig:
    """A model's configuration as attributes, with `neuron_config` beside them.

    `load_config(self)` fills the attributes, usually from a Hugging Face config; keywords are
    applied after it and win. `attribute_map` maps an alias to the attribute that it reads and
    writes.
    """

    attribute_map: dict[str, str] = {}

    def __init__(
        self,
        neuron_config: NeuronConfig,
        fused_spec_config: Any | None = None,
        load_config: Callable[[InferenceConfig], None] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.neuron_config = neuron_config
        self.fused_spec_config = fused_spec_config
        self.metadata = metadata
        if load_config is not None:
            load_config(self)
        else:
            self.load_config()
        for key, value in kwargs.items():
            setattr(self, key, value)
        self.add_derived_config()
        self.validate_config()

    def __setattr__(self, key: str, value: Any) -> None:
        super().__setattr__(type(self)._alias(self, key), value)

    def __getattribute__(self, key: str) -> Any:
        if key.startswith("__") or key == "attribute_map":
            return super().__getattribute__(key)
        return super().__getattribute__(InferenceConfig._alias(self, key))

    @staticmethod
    def _alias(config: InferenceConfig, key: str) -> str:
        """The attribute behind `key`, also before __init__ has run (deepcopy)."""
        if key == "attribute_map":
            return key
        try:
            return object.__getattribute__(config, "attribute_map").get(key, key)
        except AttributeError:
            return key

    def load_config(self) -> None:
        """Hook: fill the attributes."""

    def add_derived_config(self) -> None:
        """Hook: set attributes that follow from others; validation runs after it."""
        self.num_cores_per_group = 1

    def get_required_attributes(self) -> list[str]:
        """Names that must exist; None counts as a value."""
        return []

    def validate_config(self) -> None:
        missing = [name for name in self.get_required_attributes() if not hasattr(self, name)]
        if missing:
            raise AssertionError(
                f"The config lacks the attributes {missing}, expected all of "
                f"{self.get_required_attributes()}; use a complete config.json."
            )

    def get_text_config(self) -> InferenceConfig:
        """The configuration of the language model inside, else `self`."""
        return getattr(self, "text_config", None) or self

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return NeuronConfig

    def save(self, model_path: str | os.PathLike) -> None:
        """Write `neuron_config.json` into `model_path`, a folder that is made where it is
        missing."""
        os.makedirs(model_path, exist_ok=True)
        self.to_json_file(os.path.join(model_path, CONFIG_FILE))

    def to_json_file(self, json_file: str | os.PathLike) -> None:
        with open(json_file, "w", encoding="utf-8") as writer:
            writer.write(self.to_json_string())

    def to_json_string(self) -> str:
        content = {k: to_dict(v) for k, v in vars(self).items()}
        return json.dumps(content, indent=2, sort_keys=True) + "\n"

    @classmethod
    def load(cls, model_path: str | os.PathLike, **kwargs: Any) -> InferenceConfig:
        """The configuration that `save` wrote into `model_path`."""
        return cls.from_json_file(os.path.join(model_path, CONFIG_FILE), **kwargs)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike, **kwargs: Any) -> InferenceConfig:
        if not os.path.exists(json_file):
            raise FileNotFoundError(
                f"{json_file} is missing, expected what compile() writes; {FIRST_STEPS}."
            )
        with open(json_file, encoding="utf-8") as reader:
            return cls.from_json_string(reader.read(), **kwargs)

    @classmethod
    def from_json_string(cls, json_string: str, **kwargs: Any) -> InferenceConfig:
        content = json.loads(json_string)
        content.update(kwargs)
        neuron_config = content.pop("neuron_config")
        if not isinstance(neuron_config, NeuronConfig):
            neuron_config = cls.get_neuron_config_cls()(**neuron_config)
        content = {
            key: SimpleNamespace(**value)
            if key.endswith("_config") and isinstance(value, dict)
            else value
            for key, value in content.items()
        }
        return cls(neuron_config=neuron_config, **content)
