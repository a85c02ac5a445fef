"""Imports once the slow modules that every submission's process needs."""

import contextlib
import gc
import importlib
import logging
import os

import neuron_cpu

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
logging.basicConfig(level=logging.WARNING, format="%(message)s")
neuron_cpu.ensure_sdk()
# Modules stay, and tracing makes hundreds of thousands of objects that stay as well: collecting
# among them took a sixth of the imports' time and of a compile's.
gc.disable()
for name in (
    "torch",
    "transformers",
    "neuronx_distributed_inference.models.llama.modeling_llama",
    "neuronx_distributed_inference.utils.hf_adapter",
):
    with contextlib.suppress(Exception):  # a file of a checkout may be damaged: its user is told
        importlib.import_module(name)
gc.freeze()
gc.set_threshold(20_000)
gc.enable()
