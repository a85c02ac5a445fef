"""The submission through the steps of a contest-style driver, baseline beside it."""

import base64
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from neuronx_distributed_inference.models.config import to_torch_dtype
from neuronx_distributed_inference.models.llama import modeling_llama as baseline_llama
from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params
from neuronx_distributed_inference.utils.accuracy import get_generate_outputs
from neuronx_distributed_inference.utils.benchmark import (
    Benchmark,
    create_submodule_latency_collectors,
    generate_report,
    register_latency_collectors,
)
from neuronx_distributed_inference.utils.hf_adapter import (
    HuggingFaceGenerationAdapter,
    load_pretrained_config,
)
from neuronx_distributed_inference.utils.random import set_random_seed
from torch_neuronx.pyhlo.hlo_pb2 import HloModuleProto
from torch_neuronx.testing.validation import logit_validation
from transformers import AutoTokenizer, GenerationConfig

import llama
from tests.crossed import full
from tests.tiny_model import write_tiny_model

PROMPT = "alpha beta"
SEQ_LEN = 40


@pytest.fixture
def model_folder(tmp_path):
    """A tied checkpoint with a tokenizer of bytes."""
    return write_tiny_model(tmp_path / "model", tie_word_embeddings=True)


def prepare(module, folder, name, **arguments):
    """Config, compile, load, tokenizer: what a driver does for each of its two models."""
    arguments = {
        "torch_dtype": to_torch_dtype("float32"),
        "batch_size": 1,
        "seq_len": SEQ_LEN,
        "max_context_length": 32,
        "enable_bucketing": True,
        "tp_degree": 2,
        "model_path": str(folder),  # a command-line argument that no config knows
        **arguments,
    }
    model_cls = module.NeuronLlamaForCausalLM
    neuron_config = model_cls.get_neuron_config_cls()(**arguments)
    config = model_cls.get_config_cls()(
        neuron_config, load_config=load_pretrained_config(str(folder))
    )
    model = model_cls(str(folder), config)
    model.compile(folder / name)
    model.load(folder / name)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=neuron_config.padding_side)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder / name)
    generation_config = GenerationConfig.from_pretrained(folder)
    generation_config.update(do_sample=True, top_k=1, pad_token_id=2, eos_token_id=None)
    return model, tokenizer, generation_config


def nki_ratio():
    """The driver's count over the two first buckets, from the compiler's work folder."""
    total = nki = 0
    for tag in ("context_encoding_model", "token_generation_model"):
        path = Path(os.environ["BASE_COMPILE_WORK_DIR"]) / tag / "_tp0_bk0/model/graph.hlo"
        proto = HloModuleProto()
        proto.ParseFromString(path.read_bytes())
        for computation in proto.computations:
            shapes = {i.id: i.shape.dimensions for i in computation.instructions}
            for i in computation.instructions:
                if i.opcode == "custom-call":
                    assert i.custom_call_target == "AwsNeuronCustomNativeKernel"
                    config = json.loads(base64.b64decode(i.backend_config))
                    nki += config["mac_count"]
                    total += config["mac_count"]
                if i.opcode == "dot":
                    lhs, rhs = (shapes[o] for o in i.operand_ids)
                    shared = i.dot_dimension_numbers.rhs_contracting_dimensions
                    batch = i.dot_dimension_numbers.rhs_batch_dimensions
                    free = [s for d, s in enumerate(rhs) if d not in shared and d not in batch]
                    total += int(np.prod(lhs) * np.prod(free))
    assert total > 0
    return nki / total


@pytest.mark.parametrize("enable_nki", [full(False), True], ids=["torch", "nki"])
@pytest.mark.filterwarnings("ignore:`do_sample` is set to `False`")  # as in the contest
def test_contest_flow(model_folder, enable_nki, monkeypatch):
    monkeypatch.chdir(model_folder)
    set_random_seed(0)
    baseline, tokenizer, generation_config = prepare(baseline_llama, model_folder, "traced")
    model, *_ = prepare(llama, model_folder, "traced", enable_nki=enable_nki)
    assert model.neuron_config.nki_enabled == enable_nki

    options = dict(generation_config=generation_config, max_length=SEQ_LEN)
    expected, texts = get_generate_outputs(baseline, [PROMPT], tokenizer, **options)
    got, _ = get_generate_outputs(model, [PROMPT], tokenizer, **options)
    assert got.tolist() == expected.tolist()
    assert texts[0].startswith(PROMPT)

    assert nki_ratio() == float(enable_nki)

    inputs = tokenizer([PROMPT], return_tensors="pt")
    steps = SEQ_LEN - inputs.input_ids.shape[1]

    def scores(application, ids):
        count = SEQ_LEN - ids.shape[1]
        outputs = HuggingFaceGenerationAdapter(application).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=generation_config,
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            return_dict_in_generate=True,
            output_scores=True,
        )
        return torch.stack(outputs.scores)[:count]

    with torch.inference_mode():
        golden = scores(baseline, inputs.input_ids)
        passed, _, status = logit_validation(
            inputs.input_ids,
            lambda ids: scores(model, ids),
            golden,
            divergence_difference_tol=0.001,
        )
    assert passed, status

    report = benchmark(model, inputs, generation_config, steps)
    ahead = {"speculation_model"} if enable_nki else set()
    parts = {"e2e_model", "context_encoding_model", "token_generation_model"}
    assert set(report) == parts | ahead
    for part in report.values():
        assert part["latency_ms_p50"] <= part["latency_ms_p99"] <= part["latency_ms_p100"]
        assert part["throughput"] > 0


def benchmark(model, inputs, generation_config, steps, runs=2):
    collectors = create_submodule_latency_collectors(model)
    adapter = HuggingFaceGenerationAdapter(model)
    parameters = dict(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        generation_config=generation_config,
        max_new_tokens=steps,
        min_new_tokens=steps,
        top_k=1,
        do_sample=True,
        sampling_params=prepare_sampling_params(1, [1], [1.0], [1.0]),
        max_length=None,
    )
    timing = Benchmark(
        adapter.generate,
        parameters,
        num_runs=runs,
        preprocess_func=model.reset,
        post_warmup_func=lambda: register_latency_collectors(collectors, model),
    )
    timing.run()
    assert len(timing.latency_list) == runs
    assert len(collectors["context_encoding_model"].latency_list) == runs
    singles = len(collectors["token_generation_model"].latency_list)
    ahead = model.neuron_config.nki_enabled  # looks ahead: several tokens a call
    assert 0 < singles < runs * (steps - 1) if ahead else singles == runs * (steps - 1)
    report = {"e2e_model": generate_report(timing.latency_list, SEQ_LEN, 1, runs)}
    for tag, collector in collectors.items():
        report[tag] = generate_report(collector.latency_list, steps, 1, runs)
    return report


def test_report_formulas():
    report = generate_report([0.1, 0.2, 0.3, 0.4], max_length=50, max_batch_size=2, n_runs=4)
    assert report["latency_ms_p50"] == pytest.approx(250)
    assert report["latency_ms_p90"] == pytest.approx(370)
    assert report["latency_ms_p95"] == pytest.approx(385)
    assert report["latency_ms_p99"] == pytest.approx(397)
    assert report["latency_ms_p100"] == pytest.approx(400)
    assert report["latency_ms_avg"] == pytest.approx(250)
    assert report["throughput"] == pytest.approx(4 * 50 * 2 / 1.0)
    assert generate_report([], 1, 1) is None
