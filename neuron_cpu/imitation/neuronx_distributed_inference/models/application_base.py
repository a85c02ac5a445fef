"""A compiled application: sub-models, their shared weights, and the folder that holds them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from neuronx_distributed.parallel_layers.utils import copy_tensor_model_parallel_attributes
from neuronx_distributed.trace.trace import get_sharded_checkpoint, preprocess_checkpoint
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from neuron_cpu.console import progress
from neuron_cpu.core import keep_packed
from neuron_cpu.errors import CheckpointError, StandInError
from neuron_cpu.runtime import graph
from neuron_cpu.runtime.ranks import Group, RankPool, rank_context

from .. import artifacts
from ..modules.checkpoint import load_state_dict, without_sharing
from .config import FIRST_STEPS, InferenceConfig, NeuronConfig, refuse_real_only
from .model_wrapper import (
    SUBMODEL_TAGS,
    ModelWrapper,
    RankedModel,
    base_compile_work_dir,
    own_outputs,
    use_bucket,
)

logger = logging.getLogger("Neuron")

# Features that no model can have here. `qkv_kernel_enabled`, `attn_kernel_enabled` and
# `mlp_kernel_enabled` are not among them: models put kernels of their own behind these switches,
# and where they call the SDK's closed ones, those refuse by name.
_UNSUPPORTED = (
    "is_paged_attention",
    "attn_tkg_builtin_kernel_enabled",
    "quantized_mlp_kernel_enabled",
    "activation_quantization_type",
)
# What has one value here; None: the number of all ranks.
_ONLY = {"pp_degree": 1, "ep_degree": 1, "start_rank_id": 0, "local_ranks_size": None}
StateDict = dict[str, torch.Tensor]
PathLike = str | os.PathLike


def normalize_path(path: PathLike) -> str:
    """`path` normalised, with one trailing separator."""
    return os.path.join(os.path.normpath(os.fspath(path)), "")


class NeuronApplicationBase(nn.Module):
    """Compiles, loads and shards weights; a subclass says which sub-models exist."""

    _model_cls: Any = None
    _STATE_DICT_MODEL_PREFIX = "model."
    _NEW_STATE_DICT_MODEL_PREFIX = ""

    def __init__(
        self,
        model_path: PathLike,
        config: InferenceConfig | None = None,
        neuron_config: NeuronConfig | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, InferenceConfig | None):
            raise StandInError(
                f"The configuration is {type(config)}, expected InferenceConfig; {FIRST_STEPS}."
            )
        model_path = normalize_path(model_path)
        if config is None:
            config = self.get_config_cls().load(model_path)
        if neuron_config is not None:
            config.neuron_config = neuron_config
        self.validate_config(config)
        self.config = config
        self.neuron_config = config.neuron_config
        self.fused_spec_config = config.fused_spec_config
        self.on_device_sampling = self.neuron_config.on_device_sampling_config is not None
        self.model_path = model_path
        self.models: list[ModelWrapper] = []
        self.traced_model: list[RankedModel] | None = None
        self.is_compiled = (Path(model_path) / artifacts.MANIFEST_FILE).is_file()
        self.is_loaded_to_neuron = False
        self._pool: RankPool | None = None

    @classmethod
    def from_pretrained(*_: Any, **__: Any) -> NoReturn:
        """StandInError: transformers' models have this, and NxDI's do not."""
        raise StandInError(
            f"NxDI's models have no from_pretrained or generate; {FIRST_STEPS}, then "
            "compile(OUTPUT), load(OUTPUT) and HuggingFaceGenerationAdapter(model).generate(ids)."
        )

    @classmethod
    def validate_config(cls, config: InferenceConfig) -> None:
        """Refuse a configuration that lacks an attribute which the model reads."""
        if not hasattr(config, "neuron_config"):
            raise AssertionError("The config has no neuron_config; build an InferenceConfig.")
        refuse_unsupported(config.neuron_config)

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        raise NotImplementedError("A model class names its config class.")

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return cls.get_config_cls().get_neuron_config_cls()

    def get_compiler_args(self) -> str | None:
        """The compiler's flags; None means the wrapper's defaults."""
        return None

    def forward(self, **kwargs: Any) -> Any:
        raise NotImplementedError("A model class routes its calls.")

    # -- compile ---------------------------------------------------------------------------------

    def compile(
        self,
        compiled_model_path: PathLike,
        debug: bool = False,
        pre_shard_weights_hook: Callable[[NeuronApplicationBase], None] | None = None,
        dry_run: bool = False,
    ) -> None:
        """Trace every sub-model and bucket, and write the compiled folder (artifacts.py).

        The folder appears, or replaces an earlier one, only when it is finished. `dry_run` traces
        but shards no weights. CompileError, CheckpointError or a kernel's refusal is one sentence.
        """
        del debug
        # Nothing in here touches an earlier compile: the stage takes its place at the very end.
        with artifacts.staged_folder(Path(compiled_model_path)) as stage:
            self.config.save(stage)
            # Tracing comes before the weights, as refusals come from it and sharding reads the
            # whole checkpoint: 2.5 GB for a model of 1 B parameters.
            instances, records = self._trace_all(stage)
            warnings = self._cast_warnings()
            if not dry_run:
                if pre_shard_weights_hook is not None:
                    pre_shard_weights_hook(self)
                warnings += self._shard(instances[0], stage)
            artifacts.write_json(
                stage / artifacts.OPERATORS_FILE,
                {
                    "format": artifacts.FORMAT,
                    "tp_degree": self.neuron_config.tp_degree,
                    "warnings": warnings,
                    "graphs": [record.as_json() for record in records],
                },
            )
            # Last, because its presence is what load() takes for a finished compile.
            artifacts.write_json(stage / artifacts.MANIFEST_FILE, self._manifest())
        self.is_compiled = True

    def _manifest(self) -> dict[str, Any]:
        return {
            "format": artifacts.FORMAT,
            "nxdi": self.neuron_config.contract.version,
            "tp_degree": self.neuron_config.tp_degree,
            "submodels": {m.tag: list(m.neuron_config.buckets) for m in self.models},
        }

    def _build(self, wrapper: ModelWrapper, rank: int = 0) -> nn.Module:
        """A sub-model's module for `rank`, without weights."""
        with rank_context(Group(rank, self.neuron_config.tp_degree)):
            return wrapper.get_model_instance().load_module()

    def _trace_all(self, stage: Path) -> tuple[list[nn.Module], list[graph.GraphRecord]]:
        """Trace each bucket; graphs go to the stage, and to the work folder as on the device."""
        work_dir = Path(base_compile_work_dir())
        artifacts.clear_work_dir(work_dir, SUBMODEL_TAGS)
        # One graph serves all ranks, as on the device: shapes are the same on each, so only rank
        # 0's module is built, once a sub-model, and traced again for every bucket.
        total = sum(len(wrapper.neuron_config.buckets) for wrapper in self.models)
        instances, records = [], []
        progress.report("compile", 0, total)
        for wrapper in self.models:
            module = self._build(wrapper)
            instances.append(module)
            examples = wrapper.input_generator()
            for index, bucket in enumerate(wrapper.neuron_config.buckets):
                use_bucket(module, bucket)
                inputs = examples[index]
                with rank_context(Group(0, self.neuron_config.tp_degree)):
                    records.append(graph.trace(module, inputs, wrapper.tag, bucket))
                serialised = graph.hlo_module(records[-1]).SerializeToString()
                for root in (work_dir, stage / artifacts.GRAPHS_FOLDER):
                    path = artifacts.graph_path(root, wrapper.tag, index)
                    artifacts.write_graph(path, serialised)
                path = artifacts.graph_path(work_dir, wrapper.tag, index)
                artifacts.write_graph(path.parents[1] / "hlo_module.pb", serialised)
                progress.report("compile", len(records), total)
        return instances, records

    def _cast_warnings(self) -> list[str]:
        """A sentence for each precise buffer that the loader's cast to `torch_dtype` rounds."""
        # The buffers of every sub-model come from the same constructors: one stands for all.
        with rank_context(Group(0, self.neuron_config.tp_degree)):
            damaged = self.models[0].get_model_instance().buffers_rounded_by_cast()
        dtype = self.neuron_config.torch_dtype
        warnings = [
            f"Buffer {name} is rounded from {before} to {dtype} when the model is loaded, with a "
            f"relative error of up to {error:.1e}; compute it in forward instead of a constructor."
            for name, before, error in damaged
        ]
        for warning in warnings:
            logger.warning(warning)
        return warnings

    # -- weights ---------------------------------------------------------------------------------

    def checkpoint_loader_fn(self, mmap: bool = False) -> StateDict:
        """The checkpoint by the model's keys, floating tensors cast to `torch_dtype`."""
        del mmap
        state_dict = self.get_state_dict(self._source, self.config)
        dtype = self.neuron_config.torch_dtype
        eight_bits = (torch.float8_e4m3fn, torch.float8_e5m2)
        for key, tensor in state_dict.items():
            if key.endswith("scale") or tensor.dtype in eight_bits:
                continue
            if tensor.is_floating_point():
                state_dict[key] = tensor.to(dtype)
        return state_dict

    @property
    def _source(self) -> PathLike:
        """The folder of the weights. In 0.6 a compiled model saves no weights; the
        configuration's folder has them."""
        named = getattr(self.config, "_name_or_path", None)
        saved = self.neuron_config.contract.saves_sharded_checkpoint
        return self.model_path if saved or not named else named

    @classmethod
    def get_state_dict(cls, model_path: PathLike, config: InferenceConfig) -> StateDict:
        """Read a folder's checkpoint, rename and convert its keys, and fill in tied weights."""
        state_dict = cls._strip_prefix(cls._read_checkpoint(model_path))
        state_dict = cls.convert_hf_to_neuron_state_dict(state_dict, config)
        if getattr(config, "tie_word_embeddings", False):
            cls.update_state_dict_for_tied_weights(state_dict)
        return state_dict

    @classmethod
    def _read_checkpoint(cls, model_path: PathLike) -> StateDict:
        if os.path.isdir(model_path):
            return load_state_dict(model_path)
        return dict(cls.load_hf_model(os.fspath(model_path).rstrip(os.sep)).state_dict())

    @classmethod
    def _strip_prefix(cls, state_dict: StateDict) -> StateDict:
        old, new = cls._STATE_DICT_MODEL_PREFIX, cls._NEW_STATE_DICT_MODEL_PREFIX
        return {
            new + key[len(old) :] if key.startswith(old) else key: tensor
            for key, tensor in state_dict.items()
        }

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> nn.Module:
        raise NotImplementedError("A model class loads its Hugging Face counterpart.")

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: StateDict, config: InferenceConfig
    ) -> StateDict:
        """Hook: the model's keys and layouts from Hugging Face's (without the prefix)."""
        del config
        return state_dict

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: StateDict) -> None:
        """Hook: fill in the weights that the checkpoint leaves out because they are tied."""

    def _prepare_checkpoint(self, module: nn.Module) -> tuple[StateDict, list[str]]:
        """The full checkpoint after all hooks, and a sentence for each key that no module reads."""
        checkpoint = dict(self.checkpoint_loader_fn())
        unused = preprocess_checkpoint(module, checkpoint)
        warnings = []
        if unused:
            warnings.append(
                f"The checkpoint holds {len(unused)} tensors that no parameter takes, "
                f"which the SDK drops silently: {_some(unused)}."
            )
            logger.warning(warnings[-1])
        return checkpoint, warnings

    def _local_weights(self, checkpoint: StateDict, rank: int) -> StateDict:
        """One rank's tensors. An error names parameters that the checkpoint lacks."""
        degree = self.neuron_config.tp_degree
        module = self._build(self.models[0], rank)
        local, missing = get_sharded_checkpoint(checkpoint, module, rank, degree)
        missing = [name for name in missing if name in dict(module.named_parameters())]
        if missing:
            raise CheckpointError(
                f"{self.model_path} has no tensor for {len(missing)} parameters of the model "
                f"({_some(missing)}), expected one for each, because the SDK would silently leave "
                "them uninitialised; name them in convert_hf_to_neuron_state_dict."
            )
        return local

    def _shard(self, module: nn.Module, folder: Path) -> list[str]:
        """Slice the checkpoint for every rank into `folder`/weights; returns the warnings."""
        degree = self.neuron_config.tp_degree
        progress.report("shard weights", 0, degree + 1)
        checkpoint, warnings = self._prepare_checkpoint(module)
        progress.report("shard weights", 1, degree + 1)
        if not self.neuron_config.save_sharded_checkpoint:
            # load() reads and slices the checkpoint again; a misfit is refused here all the same,
            # where the user waits for refusals.
            self._local_weights(checkpoint, 0)
            progress.report("shard weights", degree + 1, degree + 1)
            return warnings
        (folder / artifacts.WEIGHTS_FOLDER).mkdir(exist_ok=True)
        for rank in range(degree):
            local = without_sharing(self._local_weights(checkpoint, rank))
            save_file(local, artifacts.shard_path(folder, rank))
            progress.report("shard weights", rank + 2, degree + 1)
        return warnings

    # -- load ------------------------------------------------------------------------------------

    def load(
        self,
        compiled_model_path: PathLike,
        start_rank_id: int | None = None,
        local_ranks_size: int | None = None,
        skip_warmup: bool = True,
    ) -> None:
        """Bind a compiled folder's weights to every rank, and zero the caches.

        Weights are mapped from the files, not copied. Every bucket runs once unless `skip_warmup`.
        StandInError for an unfinished folder, or one of other shapes.
        """
        del start_rank_id, local_ranks_size  # all ranks live in this process
        folder = Path(compiled_model_path)
        self._check_manifest(artifacts.read_manifest(folder), folder)
        degree = self.neuron_config.tp_degree
        self._pool = RankPool(degree)
        # Rank by rank, so that only one rank's slices are in flight; sub-models of a rank get the
        # same tensors. What no checkpoint holds are caches: one per name and rank, shared, because
        # decode reads what prefill wrote.
        per_wrapper: list[list[nn.Module]] = [[] for _ in self.models]
        checkpoint: StateDict | None = None
        for rank in range(degree):
            if artifacts.shard_path(folder, rank).is_file():
                weights = _read_shard(artifacts.shard_path(folder, rank))
            else:
                if checkpoint is None:
                    checkpoint, _ = self._prepare_checkpoint(self._build(self.models[0]))
                weights = self._local_weights(checkpoint, rank)
            caches: StateDict = {}
            for modules, wrapper in zip(per_wrapper, self.models, strict=True):
                modules.append(self._bind(wrapper, rank, weights, caches))
        outputs = own_outputs(self.neuron_config)
        self.traced_model = []
        for wrapper, modules in zip(self.models, per_wrapper, strict=True):
            wrapper.model = RankedModel(self._pool, modules, outputs)
            self.traced_model.append(wrapper.model)
        self.is_loaded_to_neuron = True
        if not skip_warmup:
            self.warmup()

    def _check_manifest(self, manifest: dict[str, Any], folder: Path) -> None:
        expected = self._manifest()
        for name in ("tp_degree", "submodels"):
            if manifest.get(name) != expected[name]:
                raise StandInError(
                    f"{folder} was compiled with {name} {manifest.get(name)}, expected "
                    f"{expected[name]} from the config; compile again or load its own config."
                )

    def _bind(
        self, wrapper: ModelWrapper, rank: int, weights: StateDict, caches: StateDict
    ) -> nn.Module:
        """One rank's module with its weights; `caches` passes the caches from sub-model to
        sub-model."""
        with rank_context(self._pool.group(rank)):
            module = wrapper.get_model_instance().load_module()
        for name, parameter in dict(module.named_parameters()).items():
            value = weights.get(name)
            if value is None:  # compile has refused every other parameter without a tensor
                if name not in caches:
                    caches[name] = torch.zeros(parameter.shape, dtype=parameter.dtype)
                value = caches[name]
            elif value.shape != parameter.shape or value.dtype != parameter.dtype:
                raise CheckpointError(
                    f"Tensor {name} of rank {rank} is {value.dtype} {list(value.shape)} in the "
                    f"compiled folder, expected {parameter.dtype} {list(parameter.shape)}; "
                    "compile again."
                )
            if name in weights:
                keep_packed(value)
            _fill(parameter, value)
        # Buffers outside of the checkpoint keep what the constructor computed, cast and all.
        for name, buffer in module.named_buffers():
            if name in weights:
                buffer.data = weights[name]
        return module

    def warmup(self) -> None:
        """Run every bucket of every sub-model once, then clear the caches."""
        for wrapper in self.models:
            buckets = wrapper.neuron_config.buckets
            for bucket, example in zip(buckets, wrapper.input_generator(), strict=True):
                wrapper.model(bucket, *example)
        self.reset()

    def reset(self) -> None:
        """Hook: forget the sequence."""


def refuse_options(neuron_config: NeuronConfig, names: Sequence[str]) -> None:
    """NotImplementedError for the first option of `names` that is on."""
    for name in names:
        if getattr(neuron_config, name, None):
            raise NotImplementedError(
                f"NeuronConfig.{name} is not supported by neuron_cpu, expected it to be off, got "
                f"{getattr(neuron_config, name)!r}; leave it out."
            )


def refuse_unsupported(neuron_config: NeuronConfig) -> None:
    """NotImplementedError for a feature of the SDK that would silently do nothing here."""
    refuse_real_only(vars(neuron_config))
    refuse_options(neuron_config, _UNSUPPORTED)
    _refuse_batches(neuron_config)
    for name, only in _ONLY.items():
        only = neuron_config.world_size if only is None else only
        if getattr(neuron_config, name) != only:
            raise NotImplementedError(
                f"NeuronConfig.{name} is {getattr(neuron_config, name)}, expected {only}, because "
                "neuron_cpu has tensor parallelism only, on one machine; leave it out."
            )
    if neuron_config.output_logits and not neuron_config.contract.gives_tokens_and_logits:
        raise ValueError(
            f"NeuronConfig.output_logits makes a list in NxDI {neuron_config.contract.version}, "
            "which its adapter cannot read, expected 0.6; leave it out."
        )
    for name in ("output_logits", "async_mode"):
        if getattr(neuron_config, name) and neuron_config.on_device_sampling_config is None:
            raise ValueError(
                f"NeuronConfig.{name} needs on_device_sampling_config, because NxDI reads the "
                "first output as tokens; leave it out."
            )


def _refuse_batches(neuron_config: NeuronConfig) -> None:
    """Refuse sizes of batches and caches that the graphs here do not have."""
    if neuron_config.is_continuous_batching and neuron_config.padding_side == "left":
        raise NotImplementedError(
            "Continuous batching with padding_side='left' would shift the caches of idle lines, "
            "expected padding_side='right'; pad on the right."
        )
    lines = getattr(neuron_config, "kv_cache_batch_size", neuron_config.max_batch_size)
    if lines != neuron_config.max_batch_size or getattr(neuron_config, "kv_cache_padding_size", 0):
        raise NotImplementedError(
            f"The cache has {lines} lines and {neuron_config.kv_cache_padding_size} of padding, "
            f"expected max_batch_size ({neuron_config.max_batch_size}) and none, because a decode "
            "step reads one cache line a row; leave kv_cache_batch_size and kv_cache_padding_size "
            "out."
        )
    one = neuron_config.contract.prefills_one_line and neuron_config.is_continuous_batching
    if one and neuron_config.ctx_batch_size != 1:
        raise NotImplementedError(
            f"ctx_batch_size is {neuron_config.ctx_batch_size}, expected 1 with continuous "
            f"batching, because NxDI {neuron_config.contract.version} prefills one cache line a "
            "call; set it to 1."
        )
    if neuron_config.tkg_batch_size != neuron_config.max_batch_size:
        raise NotImplementedError(
            f"tkg_batch_size is {neuron_config.tkg_batch_size}, expected max_batch_size "
            f"({neuron_config.max_batch_size}), because a decode step reads one cache line a row; "
            "make them equal."
        )


def _some(names: list[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, and {len(names) - limit} more"


def _read_shard(path: Path) -> StateDict:
    """Tensors mapped from a safetensors file; the system reads a page when it is used."""
    with safe_open(path, framework="pt", device="cpu") as reader:
        names = reader.keys()  # the reader itself cannot be iterated
        return {name: reader.get_tensor(name) for name in names}


def _fill(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Give a meta parameter its value; the object and its tags stay."""
    filled = nn.Parameter(value, requires_grad=False)
    filled.__dict__.update({**parameter.__dict__, **value.__dict__})
    copy_tensor_model_parallel_attributes(filled, parameter)
    torch.utils.swap_tensors(parameter, filled)
