"""Look-ahead: several tokens of a sequence in one call, and answers from its rows."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig
from neuronx_distributed_inference.utils.hf_adapter import (
    HuggingFaceGenerationAdapter,
    load_pretrained_config,
)
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import llama
from tests.crossed import crossed, full
from tests.llama.test_kernels import BF16, Plain, attend, check, heads_of, random, split_qkv, tables


@pytest.mark.parametrize(
    ("each", "past", "q", "kv", "d", "live"),
    [
        (8, 640, 16, 4, 64, 600),
        (8, 128, 9, 3, 64, 5),
        (4, 256, 32, 8, 64, 256),
        (5, 237, 4, 1, 128, 0),
        (2, 2048, 2, 2, 128, 1999),
        (16, 300, 8, 2, 64, 150),
        (3, 77, 3, 3, 64, 76),
    ],
)
def test_several_tokens_see_the_cache_and_those_before(each, past, q, kv, d, live):
    """What stands behind the mask, as wrong guesses leave it, must not count."""
    cached = [random(1, kv, past, d, seed=s) for s in (1, 2)]
    cached[0][:, :, live:], cached[1][:, :, live:] = 1e4, -1e4
    seen = torch.arange(past)[None] < live
    cos, sin = tables(torch.arange(each) + live, d)
    qkv = random(each, (q + 2 * kv) * d, seed=3)
    bias = llama._mask_bias(seen, BF16)
    *cache, bias = llama.cache_in_runs(*cached, bias, 128 // kv)
    plain = Plain(q, kv, d)
    kernel, bias = llama.attention_decode_kernel, bias.expand(each, -1).contiguous()
    got, rotated, values = plain.call(
        kernel, qkv, each, (cos, sin), *cache, bias, plain.heads, each
    )
    assert torch.equal(values, qkv[:, (q + kv) * d :])
    query, key, value = split_qkv(qkv, 1, q, kv, d)
    query, key = (rotate(t, cos, sin) for t in (query, key))
    assert torch.equal(heads_of(rotated, 1, d), key)
    mask = torch.cat((seen.expand(each, -1), torch.ones(each, each).tril().bool()), 1)[None, None]
    args = query, torch.cat((cached[0], key), 2), torch.cat((cached[1], value), 2), mask
    exact = attend(*args, torch.float64)
    size = exact.pow(2).mean(1, keepdim=True).sqrt() + 1e-30
    rounded = attend(*args, BF16, cached=past)
    check(got.double() / size, rounded.double() / size, exact / size, times=1.15)


@pytest.mark.parametrize(("heads", "degree", "tokens"), [(32, 2, 8), (64, 1, 2), (128, 1, 1)])
def test_queries_of_a_call_share_a_tile_of_scores(heads, degree, tokens):
    given = SimpleNamespace(nki_enabled=True, tp_degree=degree, max_batch_size=1)
    given.on_device_sampling_config, given.padding_side = None, "right"
    given.max_context_length = 640
    config = SimpleNamespace(num_attention_heads=heads, neuron_config=given)
    assert llama.call_tokens(config)[0] == tokens


def rotate(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


# --- a model that looks ahead ---------------------------------------------------------------------

SHAPE = dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    vocab_size=320,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.2,
    tie_word_embeddings=False,
)


def application(folder, traced="traced", **neuron):
    """The submission, compiled and loaded."""
    options = dict(seq_len=128, max_context_length=64, torch_dtype=torch.float32, batch_size=1)
    neuron_config = llama.NeuronConfigNKI(**{**options, "enable_nki": True, **neuron})
    config = llama.LlamaInferenceConfig(
        neuron_config, load_config=load_pretrained_config(str(folder))
    )
    app = llama.NeuronLlamaForCausalLM(str(folder), config)
    app.compile(str(folder / traced))
    app.load(str(folder / traced))
    return app


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(Hugging Face model, its folder, the submission)."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    model.save_pretrained(folder)
    return model, folder, application(folder)


def generated(app, prompt, count, **options):
    """Tokens behind a prompt, and their logits [count, V]."""
    ids = torch.tensor([prompt])
    given = dict(
        min_new_tokens=count, max_new_tokens=count, do_sample=True, top_k=1, pad_token_id=0
    )
    found = HuggingFaceGenerationAdapter(app).generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(),
        return_dict_in_generate=True,
        output_scores=True,
        **{**given, **options},
    )
    return found.sequences[0, len(prompt) :].tolist(), torch.cat(found.scores)


def test_text_and_logits_are_those_of_the_plain_step(tiny):
    model, _, app = tiny
    prompt = [5, 6, 7, 8, 9] * 4
    text, logits = generated(app, prompt, 100)
    calls, kept = list(app.ahead.calls), app.ahead.kept_rows
    with app.plain_steps():
        plain, wanted = generated(app, prompt, 100)
    assert text == plain
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    assert sum(calls) + kept == 99 and kept > 0


@pytest.mark.parametrize("length", [full(65), 72, full(100), full(125), 127])
def test_a_prompt_longer_than_its_graph_passes_in_calls(tiny, length):
    """63 tokens more than a prompt's graph has, and up to the end of the cache."""
    model, _, app = tiny
    ids = torch.randint(3, 320, (1, length), generator=torch.Generator().manual_seed(length))
    text, logits = generated(app, ids[0].tolist(), 128 - length)
    with torch.no_grad():
        wanted = model(torch.cat((ids, torch.tensor([text])), 1)).logits[0, length - 1 : -1]
    assert text == wanted.argmax(-1).tolist()
    torch.testing.assert_close(logits.amax(-1), wanted.amax(-1), rtol=1e-4, atol=1e-4)


def counted(app, prompt, count=60):
    """The text, and the calls that it took."""
    text, _ = generated(app, prompt, count)
    return text, [*app.ahead.calls, app.ahead.kept_rows]


def plain_text(app, prompt, count=60):
    with app.plain_steps():
        return generated(app, prompt, count)[0]


class Wrong(llama.Guesser):
    """Guesses another token of the vocabulary each time, never the right one on purpose."""

    def guess(self, most):
        return [(7 * len(self.text) + 31 * n) % 320 for n in range(most)]


class Perfect(llama.Guesser):
    """Knows what follows."""

    known: list[int] = []

    def guess(self, most):
        return self.known[len(self.text) : len(self.text) + most]


class Half(Perfect):
    """The first guesses are right, later ones are not."""

    def guess(self, most):
        return [x if n < 3 else (x + 1) % 320 for n, x in enumerate(super().guess(most))]


@pytest.mark.parametrize("kind", [Wrong, full(Perfect), full(Half)])
def test_no_guess_changes_the_text(kind, tiny, monkeypatch):
    """Cache rows of wrong guesses are never seen; right ones save calls."""
    _, _, app = tiny
    prompt = [5, 9, 5, 9, 30, 31]
    wanted = plain_text(app, prompt)
    monkeypatch.setattr(Perfect, "known", prompt + wanted, raising=False)
    monkeypatch.setattr(llama, "Guesser", kind)
    text, (_, several, kept) = counted(app, prompt)
    assert text == wanted
    assert several >= {Wrong: 50, Perfect: 8, Half: 14}[kind]
    assert kept >= {Wrong: 0, Perfect: 50, Half: 40}[kind]


def test_a_guesser_that_raises_is_left_out(tiny, monkeypatch):
    _, _, app = tiny

    def guess(self, most):
        raise KeyError("no such context")

    wanted = plain_text(app, [5, 6, 7])
    monkeypatch.setattr(llama.Guesser, "guess", guess)
    text, (single, several, kept) = counted(app, [5, 6, 7])
    assert text == wanted and (several, kept) == (0, 0) and single == 59


def test_sampling_draws_what_the_plain_step_draws(tiny):
    """A row answers only the token that it was computed for."""
    _, _, app = tiny
    runs = []
    for steps in (contextlib.nullcontext, app.plain_steps):
        torch.manual_seed(3)
        with steps():
            drawn = generated(app, [5, 6] * 5, 60, do_sample=True, top_k=2, temperature=0.7)
        runs.append(drawn[0])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("length", "count"), crossed([2, 8, 63, 64], [1, 64]))
def test_prompts_of_any_length_up_to_a_full_cache(length, count, tiny):
    _, _, app = tiny
    prompt = [3 + n % 5 for n in range(length)]
    assert counted(app, prompt, count)[0] == plain_text(app, prompt, count)


def test_tokens_that_the_caller_chooses_are_followed(tiny):
    """Teacher forcing: a text that the model would not write, checked against Hugging Face."""
    model, _, app = tiny
    text = torch.tensor([[5, 6, 5, 6, 5, 6, 99, 5, 6, 5, 6, 5, 6, 99, 5, 6, 5, 7, 8, 9, 10, 99]])
    app.reset()
    ones, positions = torch.ones_like(text), torch.arange(4)[None]
    rows = [app(input_ids=text[:, :4], attention_mask=ones[:, :4], position_ids=positions)]
    for at in range(4, text.shape[1]):
        given = dict(attention_mask=ones[:, :at], position_ids=torch.tensor([[at]]))
        rows.append(app(input_ids=text[:, at : at + 1], **given))
    with torch.no_grad():
        wanted = model(text).logits[0, 3:]
    found = torch.cat([row.logits[0, -1:] for row in rows])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert app.ahead.kept_rows > 0


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (dict(batch_size=2), "2 sequences"),
        (dict(enable_nki=False), ""),
        (dict(padding_side="left"), ""),  # refused
        (dict(seq_len=16, max_context_length=8), "prompts of at most 8 tokens"),
        (dict(speculation_length=5), ""),
        (dict(on_device_sampling_config=OnDeviceSamplingConfig()), "the device samples"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)
def test_it_steps_aside_and_says_so(asked, told, tiny, caplog):
    _, folder, _ = tiny
    options = dict(seq_len=128, max_context_length=64, torch_dtype=torch.float32, batch_size=1)
    neuron_config = llama.NeuronConfigNKI(**{**options, "enable_nki": True, **asked})
    config = llama.LlamaInferenceConfig(
        neuron_config, load_config=load_pretrained_config(str(folder))
    )
    assert not neuron_config.looks_ahead
    if config.uncovered() is None:
        llama.NeuronLlamaForCausalLM(str(folder), config)
    said = [record.message for record in caplog.records if "looks ahead" in record.message]
    assert len(said) == bool(told) and told in "".join(said)
    assert neuron_config.speculation_length == asked.get("speculation_length", 0)
    assert (config.uncovered() is not None) == (
        "padding_side" in asked or "speculation" in str(asked)
    )


def test_a_compiled_folder_knows_that_it_looks_ahead(tiny):
    _, folder, app = tiny
    read = llama.LlamaInferenceConfig.load(str(folder / "traced"))
    assert read.neuron_config.looks_ahead and read.uncovered() is None
    assert read.neuron_config.speculation_length == app.neuron_config.speculation_length
    again = llama.NeuronLlamaForCausalLM(str(folder / "traced"))
    again.load(str(folder / "traced"))
    assert counted(again, [5, 6, 7] * 3) == counted(app, [5, 6, 7] * 3)


@pytest.mark.parametrize(("version", "degree"), [full("0.1", 2), full("0.6", 1), full("0.6", 2)])
def test_versions_and_degrees(version, degree, tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_key_value_heads": 2})).eval()
    model.save_pretrained(tmp_path)
    app = application(tmp_path, tp_degree=degree)
    prompt = [9, 10, 11, 9, 10]
    wanted = plain_text(app, prompt)
    monkeypatch.setattr(Half, "known", prompt + wanted, raising=False)
    monkeypatch.setattr(llama, "Guesser", Half)
    text, (_, several, kept) = counted(app, prompt)
    assert text == wanted and several > 10 and kept > 30
    with torch.no_grad():
        best = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
    best[:, SHAPE["eos_token_id"]] = -torch.inf
    assert text == best.argmax(-1).tolist()
