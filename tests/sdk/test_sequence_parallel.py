"""Sequence parallelism: shards between the blocks, the same logits, fewer rows at the end."""

from __future__ import annotations

import warnings

import pytest
import torch
from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.parallel_layers.layers import ParallelEmbedding
from neuronx_distributed_inference.contract import VERSIONS
from neuronx_distributed_inference.models.model_wrapper import TOKEN_GENERATION_MODEL_TAG
from torch_xla.core import xla_model as xm

from harness.figures import estimate, tracing
from neuron_cpu.core.time import cost
from neuron_cpu.errors import CompileError
from neuron_cpu.runtime import graph
from neuron_cpu.runtime.ranks import Group, RankPool, rank_context
from neuron_cpu.runtime.recording import COLLECTIVE
from tests.crossed import crossed

PROMPTS = [[7, 3, 9, 11, 200, 45, 6], [5, 6, 7]]
SHARDED = dict(batch_size=2, max_context_length=32, sequence_parallel_enabled=True)


def collectives(app, index):
    """(name, elements in, elements out) of the collectives of one sub-model, in order."""
    wrapper = app.models[index]
    bucket = wrapper.neuron_config.buckets[0]
    with rank_context(Group(0, app.neuron_config.tp_degree)):
        module = wrapper.get_model_instance().load_module()
        module.n_positions = bucket
        record, _ = graph.trace(module, wrapper.input_generator()[0], wrapper.tag, bucket)
    return [
        (e.name, e.inputs[0].shape, e.outputs[0].shape)
        for e in record.events
        if e.kind == COLLECTIVE
    ]


@pytest.mark.parametrize(("version", "degree"), crossed(VERSIONS, [1, 2, 4]))
def test_the_same_logits_and_text(
    tiny_llama, application, generate, reference, monkeypatch, version, degree
):
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama(num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    sharded = application(folder, tp_degree=degree, **SHARDED)
    options = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
    got = generate(sharded, PROMPTS, 6, **options)
    for row, prompt in enumerate(PROMPTS):
        tokens, logits = reference(model, prompt, 6)
        assert got.sequences[row, -6:].tolist() == tokens.tolist()
        torch.testing.assert_close(
            torch.stack(got.logits)[:, row],
            logits,
            rtol=1e-5,
            atol=1e-5 * float(logits.abs().max()),
        )


@pytest.mark.parametrize("version", ["0.1", "0.6"])
def test_what_travels(tiny_llama, application, monkeypatch, version):
    """A scatter, then two gathers and two reduce-scatters a layer; 0.3 gathers tp rows, not S."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    _, folder = tiny_llama(num_hidden_layers=1)
    app = application(folder, load=False, tp_degree=2, **SHARDED)
    whole, half, row = (2, 32, 48), (2, 16, 48), (2, 1, 48)
    gather, last = "all-gather along dim 1", "all-gather along dim -1"
    scatter = "reduce-scatter by sum along dim 1"
    end = (gather, half, whole) if version == "0.1" else (gather, row, (2, 2, 48))
    assert collectives(app, 0) == [
        (last, (2, 32, 24), whole),
        ("reduce-scatter by max along dim 1", whole, half),
        (gather, half, whole),
        (scatter, whole, half),
        (gather, half, whole),
        (scatter, whole, half),
        end,
        (last, (2, 1, 104), (2, 1, 208)),
    ]
    assert app.models[1].tag == TOKEN_GENERATION_MODEL_TAG
    assert [name for name, *_ in collectives(app, 1)] == [last, "all-reduce", "all-reduce", last]


def test_a_bucket_that_the_ranks_do_not_divide(tiny_llama, application):
    _, folder = tiny_llama()
    with pytest.raises(CompileError, match="has 31 tokens, expected a multiple .* degree 2"):
        application(folder, load=False, tp_degree=2, **{**SHARDED, "max_context_length": 31})


def test_what_it_cannot_be_combined_with(tiny_llama, application, monkeypatch):
    _, folder = tiny_llama()
    with pytest.raises(NotImplementedError, match="meets vocab_parallel, expected one of them"):
        application(folder, load=False, tp_degree=2, vocab_parallel=True, **SHARDED)
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    with pytest.raises(NotImplementedError, match="NxDI 0.6 then answers from .* rank 0's shard"):
        application(folder, load=False, tp_degree=2, padding_side="left", **SHARDED)


def test_left_padding_where_the_whole_sequence_is_gathered(
    tiny_llama, application, generate, reference
):
    model, folder = tiny_llama()
    more = {**SHARDED, "max_context_length": 48}
    app = application(folder, tp_degree=2, padding_side="left", **more)
    got = generate(app, PROMPTS, 5)
    for row, prompt in enumerate(PROMPTS):
        assert got[row].tolist() == reference(model, prompt, 5)[0].tolist()


@pytest.mark.parametrize(
    ("computation", "expected"),
    [(xm.REDUCE_SUM, [4.0, 6.0]), (xm.REDUCE_MAX, [3.0, 4.0]), (xm.REDUCE_MIN, [1.0, 2.0])],
)
def test_reductions(computation, expected):
    """Rank r brings [1, 2] + 2 r; each keeps its element."""
    pool = RankPool(2)

    def run(rank):
        mine = torch.tensor([1.0, 2.0]) + 2 * rank
        return mappings._reduce_scatter_along_dim(mine, 0, computation).item()

    assert pool.run([lambda rank=rank: run(rank) for rank in range(2)]) == expected
    pool.close()
    with rank_context(Group(0, 2)), pytest.raises(ValueError, match="computation is 'median'"):
        mappings._reduce_scatter_along_dim(torch.empty(2, device="meta"), 0, "median")


class Scatter(torch.nn.Module):
    def forward(self, x):
        return mappings.scatter_to_sequence_parallel_region(x, 1)


def vocabulary(spmd_rank):
    return ParallelEmbedding(8, 4, use_spmd_rank=spmd_rank)


@pytest.mark.parametrize(
    ("build", "mend"),
    [(Scatter, "Use _reduce_scatter_along_dim"), (lambda: vocabulary(False), "Use use_spmd_rank")],
)
def test_what_depends_on_the_rank_of_the_trace_is_told(build, mend):
    """On the device every rank runs the graph of rank 0, whose slice it would keep."""
    ids = torch.zeros((1, 4), dtype=torch.int32)
    with rank_context(Group(0, 2)), pytest.warns(RuntimeWarning, match=f"keep rank 0's.*{mend}"):
        graph.trace(build(), (ids,), "tag", 1)
    for size, make in ((1, build), (2, lambda: vocabulary(True))):
        with rank_context(Group(0, size)), warnings.catch_warnings():
            warnings.simplefilter("error")
            graph.trace(make(), (ids,), "tag", 1)


def test_the_estimate_charges_what_travels(tiny_llama, application, tmp_path):
    """Half of the tensor for a gather or a reduce-scatter of two ranks, where it is whole."""
    _, folder = tiny_llama(num_hidden_layers=1)
    app = application(folder, load=False, tp_degree=2, **SHARDED)
    costs = cost.Overheads(collective_ns=0.0, collective_bytes_per_ns=1.0)
    events = estimate.events_of(tracing.record(app, app.models[0], 32, tmp_path))
    estimator = estimate.Estimator(cost.DEFAULT_PROFILE, costs, 2)
    operators = estimator.graph("context_encoding_model", 32, 2, events).operators
    whole = 2 * 32 * 48 * 4  # fp32
    found = {
        op.name: op.time_ns for op in operators if op.where.endswith(("attn", "mlp.down_proj"))
    }
    assert found["reduce-scatter by sum along dim 1"] == whole / 2
    gathers = [op for op in operators if op.name == "all-gather along dim 1"]
    assert {op.time_ns for op in gathers} == {whole / 2}
    assert sum(op.count for op in gathers) == 3
