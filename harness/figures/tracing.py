"""The graphs of a model as its SDK traces them: of the imitation, or of the real libraries."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from harness import sdk
from neuron_cpu.runtime import graph
from neuron_cpu.runtime.ranks import Group, rank_context
from neuron_cpu.runtime.recording import GraphRecord

Bucket = int | list[int]
_WORK_DIR = "BASE_COMPILE_WORK_DIR"
_RECORDS = "_neuron_cpu_records"  # of a model of the real library, which traces all at once


def record(model: Any, wrapper: Any, bucket: Bucket, scratch: Path) -> GraphRecord:
    """Record one sub-model and bucket on rank 0; `scratch` is a folder to write into."""
    if sdk.real_libraries() is not None:
        if not hasattr(model, _RECORDS):
            setattr(model, _RECORDS, _of_the_library(model, scratch))
        return getattr(model, _RECORDS)[wrapper.tag, str(bucket)]
    with rank_context(Group(0, model.neuron_config.tp_degree)):
        module = wrapper.get_model_instance().load_module()
        imitation = importlib.import_module("neuronx_distributed_inference.models.model_wrapper")
        imitation.use_bucket(module, bucket)
        inputs = wrapper.input_generator()[wrapper.neuron_config.buckets.index(bucket)]
        traced = graph.trace(module, inputs, wrapper.tag, bucket)
    return traced


def application(module: Any, shape: dict[str, Any], folder: Path, **settings: Any) -> Any:
    """A submission's model of such sizes on the meta device; `settings` of its NeuronConfig."""
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    adapter = importlib.import_module("neuronx_distributed_inference.utils.hf_adapter")
    own = module.NeuronConfigNKI(**{"enable_nki": True, "torch_dtype": torch.bfloat16, **settings})
    loader = adapter.load_pretrained_config(str(folder))
    config = module.LlamaInferenceConfig(own, load_config=loader)
    return module.NeuronLlamaForCausalLM(str(folder), config)


def _of_the_library(model: Any, scratch: Path) -> dict[tuple[str, str], GraphRecord]:
    """The graphs of NxD's builder by sub-model and bucket; it works in a folder of its own."""
    builder = importlib.import_module("torch_neuronx.xla_impl.trace")
    with (
        tempfile.TemporaryDirectory(dir=scratch) as folder,
        mock.patch.dict(os.environ, {_WORK_DIR: folder + os.sep}),
        builder.heard() as graphs,
        mock.patch.object(model, "_builder", None, create=True),
    ):
        model.get_builder().trace(initialize_model_weights=False)
    names = [
        (wrapper.tag, str(bucket))
        for wrapper in model.models
        for bucket in wrapper.neuron_config.buckets
    ]
    return dict(zip(names, (compiled.record for compiled in graphs), strict=True))
