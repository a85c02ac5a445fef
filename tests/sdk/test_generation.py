"""Whole applications against Hugging Face's LlamaForCausalLM, in fp32."""

import subprocess
import sys

import pytest
import torch
import transformers
from neuronx_distributed_inference.contract import VERSIONS
from neuronx_distributed_inference.models.config import FusedSpecNeuronConfig
from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaForCausalLM
from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params
from neuronx_distributed_inference.utils.accuracy import get_generate_outputs_from_token_ids
from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests import greedy
from tests.crossed import crossed, full

PROMPTS = [[7, 3, 9, 11, 200, 45, 6], [5, 6, 7], [90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100]]
STEPS = 12


def assert_same_as_reference(model, app, prompts=PROMPTS, steps=STEPS):
    """Tokens equal and logits within 1e-4 of the largest one, row by row."""
    for row, found in enumerate(zip(*greedy.logits(app, prompts, steps), strict=True)):
        tokens, logits = greedy.alone(model, prompts[row], steps)
        error = (found[1] - logits).abs().max() / logits.abs().max()
        assert error < 1e-4, f"row {row}: relative error {error}"
        assert found[0].tolist() == tokens.tolist()


@pytest.mark.parametrize(
    "option",
    [
        full({"fused_qkv": True}),
        {"vocab_parallel": True},
        {"padding_side": "left", "max_context_length": 48},
        full({"rpl_reduce_dtype": "float32"}),
        {"is_continuous_batching": True, "ctx_batch_size": 1},
        {
            "enable_bucketing": True,
            "context_encoding_buckets": [8, 16, 32],
            "token_generation_buckets": [16, 24, 48],
        },
    ],
    ids=lambda option: "-".join(option),
)
def test_options_change_no_result(tiny_llama, application, option):
    model, folder = tiny_llama()
    app = application(folder, batch_size=3, tp_degree=2, **option)
    assert_same_as_reference(model, app)


@pytest.mark.parametrize(
    ("shape", "fused"),
    crossed([(9, 3, 2), (9, 3, 3), (12, 2, 8), (5, 5, 2)], [False, True])
    + list(map(full, [(8, 1, 4), (4, 4, 8), (6, 3, 4), (10, 2, 4)] * 2, [False] * 4 + [True] * 4)),
)
def test_grouped_heads_that_do_not_divide(tiny_llama, application, shape, fused):
    heads, kv_heads, tp_degree = shape
    model, folder = tiny_llama(
        hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    app = application(folder, tp_degree=tp_degree, fused_qkv=fused)
    assert_same_as_reference(model, app, prompts=PROMPTS[:1], steps=5)


def test_more_rows_than_compiled_are_refused(tiny_llama, application):
    _, folder = tiny_llama()
    app = application(folder, batch_size=2)
    with pytest.raises(ValueError, match="batch of 3 rows.*batch_size 2.*is_continuous_batching"):
        greedy.tokens(app, PROMPTS, 2)


def test_plain_decoding_beside_a_speculation_model(tiny_llama, application, monkeypatch):
    """0.6 has no graph for it unless the model's class asks for one."""
    model, folder = tiny_llama()
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    with pytest.raises(ValueError, match=r"one token a row.*NxDI 0\.6.*enable_token_generation"):
        greedy.tokens(application(folder, speculation_length=4), PROMPTS[:1], 4)

    class Both(NeuronLlamaForCausalLM):
        def enable_speculation(self):
            super().enable_speculation()
            self.enable_token_generation()

    got = greedy.tokens(application(folder, model_cls=Both, speculation_length=4), PROMPTS[:1], 4)
    assert got[0].tolist() == greedy.alone(model, PROMPTS[0], 4)[0].tolist()


def test_a_speculation_length_that_is_a_prefill_bucket_is_refused(tiny_llama, application):
    _, folder = tiny_llama()
    with pytest.raises(ValueError, match="speculation_length 32 is a context-encoding bucket"):
        application(folder, speculation_length=32)


@pytest.mark.parametrize(("version", "bucket"), [("0.1", 16), ("0.6", 32)])
def test_the_bucket_of_a_speculation_holds_the_new_tokens_in_0_6(
    tiny_llama, application, monkeypatch, version, bucket
):
    """Twelve cached and four new tokens: the last stands at position 15."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    _, folder = tiny_llama()
    app = application(
        folder,
        speculation_length=4,
        enable_bucketing=True,
        context_encoding_buckets=[32],
        token_generation_buckets=[16, 32, 48],
    )
    mask, ids = torch.ones(1, 12), torch.zeros(1, 4, dtype=torch.int64)
    positions = torch.arange(12, 16)[None]
    assert app.speculation_model.choose_bucket(ids, mask, positions) == bucket


@pytest.mark.parametrize(("version", "rows"), crossed(VERSIONS, [1, 2]))
def test_several_tokens_over_the_cache_give_what_single_steps_give(
    tiny_llama, application, monkeypatch, version, rows
):
    """Logits of every new token, and the caches behind them: the next step reads those."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama()
    app = application(folder, speculation_length=5, batch_size=2, max_context_length=24)
    ids = torch.tensor([[7, 3, 9, 11, 200, 7, 3, 9, 44, 2, 5, 100, 17, 8, 1]] * rows)
    if rows == 2:
        ids[1] = ids[1].flip(0)
    app(
        input_ids=ids[:, :5],
        attention_mask=torch.ones(rows, 5, dtype=torch.int64),
        position_ids=torch.arange(5).expand(rows, 5),
    )
    for start in (5, 10):
        got = app(
            input_ids=ids[:, start : start + 5],
            attention_mask=torch.ones(rows, start, dtype=torch.int64),
            position_ids=torch.arange(start, start + 5).expand(rows, 5),
        ).logits
    with torch.no_grad():
        expected = model(ids).logits[:, 10:]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_loops_of_several_tokens_are_the_drivers(tiny_llama, application):
    _, folder = tiny_llama()
    app = application(folder)
    for name, value in (("prompt_lookup_num_tokens", 3), ("assistant_model", app)):
        with pytest.raises(NotImplementedError, match=f"{name} asks for a loop .* --speculate"):
            greedy.tokens(app, PROMPTS[:1], 4, **{name: value})


@pytest.mark.parametrize("version", ["0.1", "0.6"])
def test_draws_are_those_of_the_librarys_own_sampler(tiny_llama, application, monkeypatch, version):
    """It treats what transformers has treated: the temperature counts twice, and what passes top_p
    goes. Later texts of an adapter are drawn as its first one was."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama(vocab_size=256)
    app = application(folder)
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, 0.8))
    options = dict(do_sample=True, top_k=20, top_p=0.9, temperature=3.0)
    adapter = HuggingFaceGenerationAdapter(app)
    got = greedy.tokens(app, PROMPTS[:1], 8, adapter=adapter, **options)[0].tolist()
    ids = torch.tensor(PROMPTS[:1])
    for token in got:
        scores = model(ids).logits[:, -1]
        for warper in (TemperatureLogitsWarper(3.0), TopKLogitsWarper(20), TopPLogitsWarper(0.9)):
            scores = warper(ids, scores)
        scores, order = (scores / 3.0).sort(descending=True)
        reached = scores.softmax(-1).cumsum(-1)
        kept = scores.masked_fill((reached > 0.9) & (torch.arange(256) > 0), -3000)
        at = int((kept.softmax(-1).cumsum(-1) < 0.8).sum())
        assert token == int(order[0, at])
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    later, first = (
        greedy.tokens(app, PROMPTS[:1], 8, adapter=one, top_k=20)[0].tolist()
        for one in (adapter, HuggingFaceGenerationAdapter(app))
    )
    assert (later != first) == (version == "0.6")  # 0.1 draws both


def test_eos_fills_finished_rows_with_padding(tiny_llama, application):
    _, folder = tiny_llama()
    app = application(folder, batch_size=3)
    free = greedy.tokens(app, PROMPTS, STEPS)
    eos = int(free[1, 2])
    stopped = greedy.tokens(app, PROMPTS, STEPS, eos_token_id=eos, pad_token_id=77)
    for row in range(3):
        expected = free[row, : stopped.shape[1]].tolist()
        if eos in expected:
            end = expected.index(eos) + 1
            expected = expected[:end] + [77] * (len(expected) - end)
        assert stopped[row].tolist() == expected


@pytest.mark.parametrize("tp_degree", [1, 2])
def test_on_device_dynamic_sampling_per_row(tiny_llama, application, tp_degree):
    """Rows with top_k 1 stay greedy beside a row that samples, which must leave the greedy path."""
    model, folder = tiny_llama()
    config = {"do_sample": True, "dynamic": True, "global_topk": 64}
    app = application(folder, batch_size=3, tp_degree=tp_degree, on_device_sampling_config=config)
    params = prepare_sampling_params(3, [1, 50, 1], [1.0, 1.0, 0.5], [1.0, 5.0, 2.0])
    torch.manual_seed(0)
    got = greedy.tokens(app, PROMPTS, STEPS, sampling_params=params)
    free = [greedy.alone(model, prompt, STEPS)[0].tolist() for prompt in PROMPTS]
    assert got[0].tolist() == free[0]
    assert got[2].tolist() == free[2]
    assert got[1].tolist() != free[1]


@pytest.mark.parametrize(("version", "hidden"), [("0.1", False), ("0.6", True)])
def test_the_last_tokens_of_a_padded_vocabulary_are_hidden(
    tiny_llama, application, monkeypatch, version, hidden
):
    """208 + 3 tokens on two ranks: one column of padding, and NxDI hides as many real ones."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama(vocab_size=211)
    app = application(folder, tp_degree=2)
    ids = torch.tensor(PROMPTS[:1])
    logits = app(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None]).logits[0, 0]
    assert (float(logits[-1]) == torch.finfo(torch.float32).min) == hidden
    torch.testing.assert_close(logits[:-1], model(ids).logits[0, -1, :-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("version", "least"), [("0.1", False), ("0.6", True)])
def test_padding_of_a_sharded_head_wins_in_0_1(
    tiny_llama, application, monkeypatch, version, least
):
    """Where all logits are below zero, the zeros of the padding are the largest."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama(vocab_size=211)
    app = application(folder, tp_degree=2, on_device_sampling_config={"top_k": 1})
    head = app.models[0].model.modules[0].lm_head
    monkeypatch.setattr(type(head), "forward", _below_zero(type(head).forward))
    ids = torch.tensor(PROMPTS[:1])
    token = app(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None]).tokens
    assert (int(token) < 211) == least


def _below_zero(forward):
    def below(self, *args):
        logits = forward(self, *args)
        padding = logits == 0
        return torch.where(padding, logits, -logits.abs() - 1)

    return below


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": torch.ones(1, 7)}, "torch.float32.*casts none"),
        ({"seq_ids": torch.zeros(1, 1, dtype=torch.int64)}, "seq_ids have 2 dimensions"),
        ({"sampling_params": torch.ones(1, 3, dtype=torch.int64)}, "sampling_params torch.int64"),
        ({"sampling_params": torch.ones(2, 3)}, "2 rows of sampling parameters.*expected 1"),
    ],
)
def test_inputs_that_no_graph_takes_are_refused(tiny_llama, application, given, message):
    _, folder = tiny_llama()
    app = application(folder)
    ids = torch.tensor(PROMPTS[:1])
    with pytest.raises(ValueError, match=message):
        app(input_ids=ids, position_ids=torch.arange(7)[None], **given)


def test_a_prompt_of_a_batch_needs_its_own_sampling_parameters(tiny_llama, application):
    """NxDI's default has a row for each of the batch, which a graph of one prompt does not take."""
    _, folder = tiny_llama()
    app = application(folder, batch_size=3, ctx_batch_size=1, is_continuous_batching=True)
    inputs = dict(input_ids=torch.tensor(PROMPTS[:1]), position_ids=torch.arange(7)[None])
    with pytest.raises(ValueError, match=r"3 rows .* sampling_params=prepare_sampling_params\(1\)"):
        app(**inputs)
    assert app(**inputs, sampling_params=prepare_sampling_params(1)).logits.shape == (1, 1, 208)


def test_left_padding_takes_whole_prompts_only(tiny_llama, application):
    _, folder = tiny_llama()
    app = application(folder, padding_side="left", max_context_length=48)
    ids = torch.tensor(PROMPTS[:1])
    with pytest.raises(
        ValueError, match="7 columns padded on the left, expected 48, the whole seq"
    ):
        app(input_ids=ids, position_ids=torch.arange(7)[None])


def test_on_device_sampling_can_return_logits(tiny_llama, application, monkeypatch):
    model, folder = tiny_llama()
    options = {"output_logits": True, "on_device_sampling_config": {"top_k": 1}}
    with pytest.raises(ValueError, match="output_logits makes a list in NxDI 0.1"):
        application(folder, load=False, **options)
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    app = application(folder, tp_degree=2, **options)
    ids = torch.tensor(PROMPTS[:1])
    output = app(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None])
    expected = model(ids).logits[:, -1:]
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4)
    assert output.tokens.tolist() == expected[:, 0].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("prompt", "steps", "message"),
    [
        ([5], 2, "A prompt has only one token"),
        (list(range(3, 40)), 2, "prompt has 37 tokens, expected at most 32"),
        ([5, 6, 7], 60, "got position 48, expected less than the largest bucket 48"),
    ],
)
def test_calls_that_no_graph_serves_are_refused(tiny_llama, application, prompt, steps, message):
    _, folder = tiny_llama()
    app = application(folder)
    with pytest.raises(ValueError, match=message):
        greedy.tokens(app, [prompt], steps)


def test_a_padding_token_inside_the_prompt_does_not_cut_it(tiny_llama, application, caplog):
    """NxDI 0.1 counts ids that differ from the padding id; here the fitting bucket is used."""
    model, folder = tiny_llama()
    app = application(
        folder,
        enable_bucketing=True,
        context_encoding_buckets=[8, 32],
        token_generation_buckets=[48],
    )
    prompt = [0, 0, 5, 6, 7, 8, 9, 10, 11]
    greedy.assert_equal(app, model, [prompt], 4)
    assert "would choose bucket 8 and lose 1 tokens" in caplog.text


def test_classes_of_the_libraries_alone_are_refused_in_a_sentence(tiny_llama, application):
    """A script of theirs imports them; it ended in a bare ImportError."""
    with pytest.raises(NotImplementedError, match="FusedSpecNeuronConfig belongs to.*--libraries"):
        FusedSpecNeuronConfig(None, None, "draft")
    app = application(tiny_llama()[1], load=False)
    with pytest.raises(NotImplementedError, match="draft model guesses over the real libraries"):
        get_generate_outputs_from_token_ids(app, [[1, 2]], None, draft_model=app)


def test_the_adapter_is_a_model_of_transformers(application, tiny_llama):
    adapter = HuggingFaceGenerationAdapter(application(tiny_llama()[1]))
    assert isinstance(adapter, transformers.PreTrainedModel)
    assert adapter.config.hidden_size == adapter.neuron_model.config.hidden_size


@pytest.mark.full
def test_a_submission_s_process_imports_no_models_of_transformers():
    """They and what they bring (scipy, sympy, PyTorch's compiler) take 106 MiB and 1.2 s."""
    script = "import harness.processes.preload, harness.session.model, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    loaded = {"transformers.modeling_utils", "scipy.optimize", "sympy", "torch._dynamo"}
    found = done.stdout.split()
    assert "harness.session.model" in found, done.stderr
    assert not loaded & set(found)
