"""What NxD Inference keeps in modules of their own: helpers of a few lines, and names that stand
for what only the library has. The package's table says where model files find them.
"""

import argparse
import random
from typing import Any

import numpy
import torch
from neuronx_distributed.parallel_layers import parallel_state
from torch import nn

from neuron_cpu.libraries import only_of_the_library
from neuron_cpu.runtime.ranks import Group

AUTO = "auto"
BENCHMARK_REPORT_FILENAME = "benchmark_report.json"


def get_tp_group(config: Any) -> Group | None:
    """None (the default group) unless the model is a draft with ranks of its own."""
    if getattr(config.neuron_config, "use_draft_group", False):
        return parallel_state.get_speculative_draft_group(as_list=False)
    return None


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's and PyTorch's generators."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def calculate_num_cores_per_group(num_attn_heads: int, num_kv_heads: int, tp_degree: int) -> int:
    """Ranks that share one key-value head in flash decoding, whose arithmetic model files import:
    min(tp, query heads) / key-value heads, if whole."""
    ranks = min(tp_degree, num_attn_heads)
    if ranks % num_kv_heads != 0:
        raise AssertionError(
            f"Flash decoding would share {num_kv_heads} key-value heads among {ranks} ranks, "
            "expected a multiple of the heads; leave flash_decoding_enabled off, or choose a "
            "tensor-parallel degree that is one."
        )
    return ranks // num_kv_heads


class StringOrIntegers(argparse.Action):
    """An option of model scripts: the word "auto" alone, or integers."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        given = [str(value).lower() for value in values]
        numbers = [word.lstrip("-").isdigit() for word in given]
        if given != [AUTO] and not all(numbers):
            raise argparse.ArgumentTypeError(
                f"{option_string} got {' '.join(given)!r}, expected {AUTO!r} alone or integers."
            )
        made: str | list[int] = AUTO if given == [AUTO] else [int(word) for word in given]
        setattr(namespace, self.dest, made)


class ModuleMarkerStartWrapper(nn.Module):
    """A mark at which the compiler sees a layer begin; it returns its inputs."""

    def forward(self, *args: Any) -> Any:
        return args[0] if len(args) == 1 else args


class ModuleMarkerEndWrapper(ModuleMarkerStartWrapper):
    """A mark at which the compiler sees a layer end; it returns its inputs."""


def is_lora_module(module: nn.Module) -> bool:
    """Whether a layer has adapters: none has, as they run over the real libraries."""
    del module
    return False


FusedSpecNeuronConfig = only_of_the_library("FusedSpecNeuronConfig")
LoraServingConfig = only_of_the_library("LoraServingConfig")
tiled_all_gather_matmul = only_of_the_library("tiled_all_gather_matmul")
