"""Decode one step ahead of the caller: the same tokens, and no trace of a step that nobody took."""

from __future__ import annotations

import threading

import pytest
import torch
from neuronx_distributed_inference.contract import VERSIONS

PROMPTS = [[7, 3, 9, 11, 200, 45, 6], [5, 6, 7], [9, 8, 150, 31, 77]]
SAMPLING = {"on_device_sampling_config": {"top_k": 1}}


@pytest.fixture
def ahead(tiny_llama, application, monkeypatch):
    """Factory of (reference model, application that runs ahead) under a version."""

    def make(version: str = "0.2", **options):
        monkeypatch.setenv("NEURON_CPU_NXDI", version)
        model, folder = tiny_llama()
        keyword = "async" if version == "0.1" else "async_mode"
        return model, application(folder, **SAMPLING, **{keyword: True}, **options)

    return make


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[1], VERSIONS[-1]])
@pytest.mark.parametrize("options", [{}, {"padding_side": "left"}], ids=["right", "left"])
def test_text_is_that_without_it(ahead, generate, reference, version, options):
    model, app = ahead(version, batch_size=3, tp_degree=2, **options)
    got = generate(app, PROMPTS, 12)
    for row, prompt in enumerate(PROMPTS):
        assert got[row].tolist() == reference(model, prompt, 12)[0].tolist()
    assert app.async_decode.ready == 10  # of eleven decode steps the first one was not ahead


def test_it_stops_in_front_of_the_end_of_the_cache(ahead, generate, reference):
    model, app = ahead()
    prompt = PROMPTS[0]
    got = generate(app, [prompt], 48 - len(prompt))
    assert got[0].tolist() == reference(model, prompt, 48 - len(prompt))[0].tolist()
    # decode begins at the prompt's end, and none is submitted at or behind position 48 - 2
    assert app.async_decode.ready == 46 - len(prompt)


def test_a_step_ahead_that_nobody_takes_leaves_no_trace(ahead, reference):
    """A new prompt on another line, then a new one on the line of the unused step; both decode
    beside each other, and the account of the lines is that of the steps that were taken."""
    model, app = ahead(batch_size=2, is_continuous_batching=True, ctx_batch_size=1)
    tokens: dict[int, list[int]] = {}

    def start(line: int, prompt: list[int]) -> None:
        output = app(
            input_ids=torch.tensor([prompt]),
            position_ids=torch.arange(len(prompt))[None],
            seq_ids=torch.tensor([line]),
        )
        tokens[line] = [*prompt, int(output.tokens)]

    def step(*lines: int) -> None:
        output = app(
            input_ids=torch.tensor([tokens[line][-1:] for line in lines]),
            position_ids=torch.tensor([[len(tokens[line]) - 1] for line in lines]),
            seq_ids=torch.tensor(lines),
        )
        for line, token in zip(lines, output.tokens.tolist()):
            tokens[line].append(token)

    start(0, PROMPTS[1])
    for _ in range(3):
        step(0)
    start(1, PROMPTS[0])
    assert app.cache_lines.state()[0] == {0: len(PROMPTS[1]) + 3, 1: len(PROMPTS[0])}
    for _ in range(4):
        step(0, 1)
    assert tokens[0] == [*PROMPTS[1], *reference(model, PROMPTS[1], 8)[0].tolist()]
    start(0, PROMPTS[2])
    for _ in range(3):
        step(0, 1)
    for line, prompt in ((0, PROMPTS[2]), (1, PROMPTS[0])):
        expected = reference(model, prompt, len(tokens[line]) - len(prompt))[0].tolist()
        assert tokens[line] == [*prompt, *expected]
    assert app.async_decode.ready == 2 + 3 + 2


def test_tokens_are_drawn_as_without_it_though_steps_are_forgotten(
    tiny_llama, application, monkeypatch
):
    """The caller goes on with tokens of its own: what the step ahead has drawn is put back."""
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.2")
    _, folder = tiny_llama()
    sampling = {"on_device_sampling_config": {"top_k": 50, "do_sample": True}}
    drawn = []
    for ahead in (False, True):
        app = application(folder, **sampling, async_mode=ahead)
        torch.manual_seed(0)
        ids = torch.tensor([PROMPTS[0]])
        app(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None])
        tokens = []
        for position, token in enumerate((50, 60, 70), len(PROMPTS[0])):
            inputs = {"input_ids": [[token]], "position_ids": [[position]]}
            output = app(**{name: torch.tensor(value) for name, value in inputs.items()})
            tokens.append(int(output.tokens))
        app.reset()
        drawn.append((tokens, torch.get_rng_state().tolist()))
    assert drawn[0] == drawn[1] and app.async_decode.ready == 0


def test_the_next_step_runs_while_the_caller_has_the_last_one(ahead):
    _, app = ahead()
    ids = torch.tensor([PROMPTS[0]])
    token = int(app(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None]).tokens)
    inside, go = threading.Event(), threading.Event()
    original = app.token_generation_model.model
    calls = []

    def held(*inputs):
        calls.append(threading.current_thread().name)
        if len(calls) == 2:
            inside.set()
            assert go.wait(30)
        return original(*inputs)

    app.token_generation_model.model = held
    app(input_ids=torch.tensor([[token]]), position_ids=torch.tensor([[7]]))
    assert inside.wait(30)  # this thread goes on while the step is held
    assert calls == [threading.current_thread().name, "decode-ahead"]
    go.set()


def test_a_failure_ahead_is_told_to_who_asks_for_the_step(ahead):
    _, app = ahead()
    ids = torch.tensor([PROMPTS[0]])
    token = int(app(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None]).tokens)
    original, failures = app.token_generation_model.model, [None, RuntimeError("it broke")]

    def failing(*inputs):
        error = failures.pop(0)
        if error is not None:
            raise error
        return original(*inputs)

    app.token_generation_model.model = failing
    output = app(input_ids=torch.tensor([[token]]), position_ids=torch.tensor([[7]]))
    with pytest.raises(RuntimeError, match="it broke"):
        app(input_ids=output.tokens[:, None], position_ids=torch.tensor([[8]]))


def test_tokens_must_be_chosen_on_the_device(tiny_llama, application, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.2")
    _, folder = tiny_llama()
    with pytest.raises(NotImplementedError, match="async_mode needs on_device_sampling_config"):
        application(folder, async_mode=True)
