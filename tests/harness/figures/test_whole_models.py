"""Whole models against published times: each anchor stays within ±15 % (docs/cost_model.md)."""

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import neuronxcc.nki.language as nl
import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel

import llama
from harness.figures import tracing
from harness.figures.estimate import Estimator, events_of
from harness.figures.estimated_speed import SpeedEstimates
from harness.figures.graphs import DECODE, PREFILL
from harness.model_shapes import MODEL_SHAPES
from harness.output import profile_report
from harness.simulator import cost
from neuron_cpu.core import Kernel
from neuron_cpu.runtime import graph, outside, recording

HOST = cost.Overheads(graph_ns=0.0, logits_ns=0.0).step_ns()


def near(estimated, *published):
    """Whether an estimate lies within ±15 % of a published range."""
    return 0.85 * min(published) <= estimated <= 1.15 * max(published)


@pytest.fixture(scope="module")
def contest():
    """Milliseconds of a step or prompt of the contest's baseline at degree 2: PyTorch alone."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = dict(seq_len=640, max_context_length=640, tp_degree=2, batch_size=1)
        buckets = dict(enable_bucketing=True, context_encoding_buckets=[128, 640])
        model = tracing.application(
            llama, MODEL_SHAPES["llama-3.2-1b"], Path(folder), **sizes, **buckets, enable_nki=False
        )
        wrappers = {wrapper.tag: wrapper for wrapper in model.models}

        def milliseconds(tag, bucket):
            events = events_of(tracing.record(model, wrappers[tag], bucket, Path(folder)))
            estimator = Estimator(cost.DEFAULT_PROFILE, cost.Overheads(), 2)
            return estimator.graph(tag, bucket, 1, events).latency_ns / 1e6

        yield milliseconds


def test_the_call_of_a_step_that_is_pytorch_s_alone(contest):
    """The 2nd place's, whose graph is the baseline's within 1 us. The baseline's own is not
    published."""
    assert near(contest(DECODE, 640) - HOST / 1e6, 7.59)


# Prompt tokens -> the run's ms and tokens/s (aws-samples/nki-llama 1e7cc63, prompt_data.txt, rows
# 15 and 4; all of the 25 ran with --seq-len 640).
RUNS = {7: (6499.58, 101.65), 402: (6433.239, 102.60)}


@pytest.mark.parametrize("prompt", RUNS)
def test_a_published_throughput_counts_the_prompt_and_is_no_step(prompt):
    """640 tokens at that rate take the run's time, whatever the prompt has; new tokens alone would
    take a third of it behind the longer one. So do reports here count: a run of steps of 9.3 ms
    has less than 9.3 ms a token. Behind the longer prompt it has not the published figure: that
    was not the prompt's own run."""
    milliseconds, rate = RUNS[prompt]
    assert 0.94 < 640 / rate * 1e3 / milliseconds < 1
    assert ((640 - prompt) / rate * 1e3 / milliseconds > 0.9) == (prompt == 7)
    run = object.__new__(SpeedEstimates)
    settings = SimpleNamespace(batch_size=1)
    run._loaded = SimpleNamespace(session=SimpleNamespace(settings=settings))
    run._prompt = lambda tokens: np.array([33.4, 0, 0])
    run._token = lambda *at: np.array([9.3, 0, 0])
    each = 1e3 / run.report(prompt, 640 - prompt).e2e_model["throughput"]
    assert each == pytest.approx((33.4 + (639 - prompt) * 9.3) / 640) and each < 9.3
    assert near(each, 1e3 / rate) == (prompt == 7)


# Milliseconds a token end to end and of a step's call, by the entries' own reports.
REPORTS = {
    "2nd place": (9.44, 7.59), "3rd place": (10.76, 8.54), "NYU d381f84": (10.72, 8.03),
    "NYU 473f6b0": (10.51, 8.28),
}  # fmt: skip


def test_the_host_is_the_median_of_reports():
    outside = [token - call for token, call in REPORTS.values()]
    assert pytest.approx(statistics.median(outside), abs=0.01) == HOST / 1e6


@pytest.mark.parametrize(("bucket", "published"), [(128, (14.13, 15.77)), (640, (33.86, 34.63))])
def test_the_call_of_a_prompt(contest, bucket, published):
    """Entries whose prompts are PyTorch's but for norms, SiLU or the MLP."""
    assert near(contest(PREFILL, bucket) - HOST / 1e6, *published)


ENCODERS = {"bert-base": (BertModel, BertConfig), "distilbert": (DistilBertModel, DistilBertConfig)}


@pytest.mark.parametrize(
    ("name", "batch", "published"),
    [("bert-base", 1, 0.943), ("bert-base", 16, 9.345), ("distilbert", 1, 0.543),
     ("distilbert", 16, 5.010)],
)  # fmt: skip
def test_encoders_on_one_core(name, batch, published):
    """The vendor's trn1-inference-performance page: 128 tokens a sequence, products in bf16."""
    model_class, config_class = ENCODERS[name]
    with torch.device("meta"):
        model = model_class(config_class(attn_implementation="eager")).to(torch.bfloat16).eval()
        ids = torch.zeros(batch, 128, dtype=torch.long)
    record = graph.trace(_Hidden(model), (ids, torch.ones_like(ids)), "encoder", 128)
    times = [
        outside.work(event).ns(modular=False)
        for event in record.events
        if event.name not in recording.METADATA_ONLY | {"embedding"}
    ]
    assert near((sum(times) + cost.Overheads().graph_ns) / 1e6, published)


class _Hidden(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask, return_dict=False)[0]


def test_turned_operands_have_a_row_of_their_own(monkeypatch):
    """Decode and prefill have the same rows; the weights' part is free in a step."""

    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    program = Kernel(kernel).trace(torch.empty(128, 64, device="meta"))
    works = outside.Work(), outside.Work(dma=20.0, tensor=30.0), outside.Work(dma=70.0, tensor=30.0)
    monkeypatch.setattr(outside, "turning", lambda operands: works[len(operands)])
    weight = recording.TensorShape((128, 64), torch.float32, weight=True)
    inputs = weight, replace(weight, weight=False)
    event = recording.Event("layers.0", recording.KERNEL, "k", inputs, (), program=program)
    weights = replace(event, inputs=(weight, weight))
    estimator = Estimator(cost.DEFAULT_PROFILE, cost.Overheads(), 1)
    prompt, step, loaded = (
        estimator.graph(tag, 128, 1, [one, replace(one, where="layers.1")])
        for tag, one in ((PREFILL, event), (DECODE, event), (DECODE, weights))
    )
    for found, time, moved in ((prompt, 100.0, 70), (step, 30.0, 20), (loaded, 0.0, 0)):
        (turned,) = (op for op in found.operators if op.name == "turned operands of k")
        assert (turned.time_ns, turned.count, turned.where) == (time, 2, "layers.*")
        assert turned.bytes == round(moved * 272) and not turned.macs
        own, other = (next(op for op in g.operators if op.name == "k") for g in (prompt, found))
        assert own.time_ns == other.time_ns and len(found.operators) == 2
        said = profile_report.included(found)
        assert "weight.transpose(0, 1)" in said
        assert ("NxDI lays them out" in said) == (found is loaded)
        assert sum(time for *_, time in found.steps) == pytest.approx(
            sum(op.total_ns for op in found.operators)
        )


def test_views_of_weights_are_known_as_such():
    """A kernel that gets a turned weight, a turned cache and a turned result."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64, 128))
            self.past_key_values = torch.nn.ParameterList([torch.ones(64, 128)])

        def forward(self, x):
            views = self.weight, self.past_key_values[0], x + 1
            return tuple(copied(view.transpose(0, 1)) for view in views)

    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    copied = Kernel(kernel)
    record = graph.trace(Model(), [torch.ones(64, 128)], "t", 128)
    kernels = [event for event in record.events if event.program is not None]
    operands = [event.inputs[0] for event in kernels]
    assert [(one.contiguous, one.weight) for one in operands] == [
        (False, True), (False, False), (False, False),
    ]  # fmt: skip
