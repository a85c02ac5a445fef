"""Latency of an application and of its sub-models, with NxDI's report keys and formulas."""

import copy
import json
import os
import time
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

import numpy as np
import torch
from transformers import GenerationConfig

from ..models.model_wrapper import (
    CONTEXT_ENCODING_MODEL_TAG,
    SPECULATION_MODEL_TAG,
    TOKEN_GENERATION_MODEL_TAG,
)
from ..modules.generation.sampling import prepare_sampling_params
from .constants import BENCHMARK_REPORT_FILENAME, END_TO_END_MODEL
from .hf_adapter import HuggingFaceGenerationAdapter

Report = Dict[str, float]
DEFAULT_RUNS = 20
# What `benchmark_sampling(target=...)` calls a sub-model, and its tag.
_TARGETS = {
    "context_encode": CONTEXT_ENCODING_MODEL_TAG,
    "token_gen": TOKEN_GENERATION_MODEL_TAG,
    "speculation": SPECULATION_MODEL_TAG,
}


class Benchmark:
    """Calls a function once to warm up and `num_runs` times on the clock.

    `input_param` is a tuple (positional), a dict (keywords) or a single argument. The timed span
    of a run includes `preprocess_func`. `post_warmup_func` runs between warm-up and timing.
    """

    def __init__(
        self,
        benchmark_func: Callable[..., Any],
        input_param: Any,
        num_runs: int = DEFAULT_RUNS,
        preprocess_func: Optional[Callable[[], Any]] = None,
        post_warmup_func: Optional[Callable[[], Any]] = None,
    ) -> None:
        if isinstance(input_param, (tuple, list)):
            self.benchmark_func = partial(benchmark_func, *input_param)
        elif isinstance(input_param, dict):
            self.benchmark_func = partial(benchmark_func, **input_param)
        else:
            self.benchmark_func = partial(benchmark_func, input_param)
        self.num_runs = num_runs
        self.preprocess_func = preprocess_func
        self.post_warmup_func = post_warmup_func
        self.latency_list: List[float] = []  # seconds

    def _call(self) -> None:
        if self.preprocess_func is not None:
            self.preprocess_func()
        self.benchmark_func()

    def run(self) -> None:
        """Fill `latency_list` with one wall-clock time a run."""
        self._call()
        if self.post_warmup_func is not None:
            self.post_warmup_func()
        for _ in range(self.num_runs):
            start = time.time()
            self._call()
            self.latency_list.append(time.time() - start)


class LatencyCollector:
    """Forward hooks that time a module; `latency_list` is in seconds."""

    def __init__(self) -> None:
        self.start: Optional[float] = None
        self.latency_list: List[float] = []

    def pre_hook(self, *args: Any) -> None:
        del args
        self.start = time.time()

    def hook(self, *args: Any) -> None:
        del args
        self.latency_list.append(time.time() - self.start)


def create_submodule_latency_collectors(model: Any) -> Dict[str, LatencyCollector]:
    """A collector for each sub-model that `model` has, by its tag."""
    tags = (CONTEXT_ENCODING_MODEL_TAG, TOKEN_GENERATION_MODEL_TAG, SPECULATION_MODEL_TAG)
    return {tag: LatencyCollector() for tag in tags if hasattr(model, tag)}


def register_latency_collectors(
    latency_collectors: Dict[str, LatencyCollector], model: Any
) -> None:
    """Attach the collectors to the sub-models; they stay attached, as NxDI leaves them."""
    for tag, collector in latency_collectors.items():
        register_forward_latency_collector(collector, getattr(model, tag))


def register_forward_latency_collector(latency_collector: LatencyCollector, model: Any) -> None:
    """Time the calls of the module `model`."""
    model.register_forward_pre_hook(latency_collector.pre_hook)
    model.register_forward_hook(latency_collector.hook)


def generate_report(
    latency_list: Union[Sequence[float], np.ndarray],
    max_length: int,
    max_batch_size: int,
    n_runs: int = DEFAULT_RUNS,
) -> Optional[Report]:
    """Percentiles in ms and throughput in tokens/s; None without any latency.

    throughput = n_runs * max_length * max_batch_size / total seconds.
    """
    if len(latency_list) == 0:
        return None
    latencies = np.array(latency_list)
    report = {
        f"latency_ms_p{level}": float(np.percentile(latencies, level) * 1000)
        for level in (50, 90, 95, 99, 100)
    }
    report["latency_ms_avg"] = float(np.average(latencies) * 1000)
    report["throughput"] = float(n_runs * max_length * max_batch_size / latencies.sum())
    return report


def benchmark_sampling(
    model: Any,
    draft_model: Optional[Any] = None,
    generation_config: Optional[GenerationConfig] = None,
    target: Optional[str] = None,
    image: Optional[Any] = None,
    benchmark_report_path: Union[str, os.PathLike] = BENCHMARK_REPORT_FILENAME,
    num_runs: int = DEFAULT_RUNS,
) -> Dict[str, Optional[Report]]:
    """Time generation behind a random prompt of `max_context_length` tokens up to `max_length`.

    `target`: "all" (the default) for generation and, within it, the sub-models; "e2e" for
    generation only; "context_encode", "token_gen" or "speculation" for calls of that sub-model's
    largest bucket. Prints the report, writes it to `benchmark_report_path` and returns it.
    """
    if draft_model is not None or image is not None:
        raise NotImplementedError(
            "neuron_cpu benchmarks a text model by itself, expected neither draft_model nor image; "
            "leave both out."
        )
    target = target or "all"
    if target in _TARGETS:
        report = {_TARGETS[target]: _time_submodel(model, target, num_runs)}
    elif target in ("all", "e2e"):
        report = _time_generation(model, generation_config, target == "all", num_runs)
    else:
        raise ValueError(
            f"target is {target!r}, expected one of {['all', 'e2e', *_TARGETS]}; pass one of them."
        )
    model.reset()
    print("Benchmark completed and its result is as following")
    print(json.dumps(report, indent=4))
    with open(benchmark_report_path, "w", encoding="utf-8") as writer:
        json.dump(report, writer)
    print(f"Completed saving result to {benchmark_report_path}")
    return report


def _time_generation(
    model: Any, generation_config: Optional[GenerationConfig], submodels: bool, num_runs: int
) -> Dict[str, Optional[Report]]:
    """Reports of whole generations and, with `submodels`, of the calls inside them."""
    config = model.neuron_config
    new_tokens = config.max_length - config.max_context_length
    if new_tokens < 1:
        raise ValueError(
            f"The benchmark's prompt has max_context_length = {config.max_context_length} tokens, "
            f"expected fewer than max_length = {config.max_length}, so that there is room to "
            "generate; build the NeuronConfig with a smaller max_context_length."
        )
    generation_config = copy.deepcopy(generation_config) or GenerationConfig(do_sample=True)
    # A run always makes all of its tokens; transformers would replace None by the model's own.
    generation_config.eos_token_id = []
    if generation_config.pad_token_id is None:  # else transformers takes the first end token
        generation_config.pad_token_id = model.config.pad_token_id or 0
    shape = (config.batch_size, config.max_context_length)
    prompt = torch.randint(1, min(100, model.config.vocab_size), shape)
    arguments = {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        "generation_config": generation_config,
        "max_new_tokens": new_tokens,
        "top_k": 1,
        "do_sample": True,
        "sampling_params": prepare_sampling_params(config.batch_size),
    }
    collectors = create_submodule_latency_collectors(model) if submodels else {}
    benchmark = Benchmark(
        HuggingFaceGenerationAdapter(model).generate,
        arguments,
        num_runs,
        preprocess_func=model.reset,
        post_warmup_func=lambda: register_latency_collectors(collectors, model),
    )
    benchmark.run()
    report = {
        END_TO_END_MODEL: generate_report(
            benchmark.latency_list, config.max_length, config.max_batch_size, num_runs
        )
    }
    tokens = {CONTEXT_ENCODING_MODEL_TAG: config.max_context_length}
    for tag, collector in collectors.items():
        report[tag] = generate_report(
            collector.latency_list, tokens.get(tag, new_tokens), config.max_batch_size, num_runs
        )
    return report


def _time_submodel(model: Any, target: str, num_runs: int) -> Optional[Report]:
    """Report of calls of one sub-model with example inputs of its largest bucket."""
    wrapper = getattr(model, _TARGETS[target], None)
    if wrapper is None:
        raise ValueError(
            f"target is {target!r}, expected a sub-model that was compiled, and there is no "
            f"{_TARGETS[target]}; choose another target."
        )
    benchmark = Benchmark(wrapper, tuple(wrapper.input_generator()[-1][:5]), num_runs)
    benchmark.run()
    config = model.neuron_config
    return generate_report(
        benchmark.latency_list, config.max_length, config.max_batch_size, num_runs
    )
