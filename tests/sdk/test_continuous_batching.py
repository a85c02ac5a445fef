"""Requests that come and go on cache lines of their own, in every version of NxDI."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from neuronx_distributed_inference.contract import VERSIONS
from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params

from tests import greedy
from tests.crossed import full

PROMPTS = [[7, 3, 9, 11, 200, 45, 6], [5, 6, 7], [9, 8, 150, 31, 77], [12, 100]]


class Requests:
    """Greedy requests on an application, each on a cache line: what a scheduler would hold."""

    def __init__(self, app):
        self.app = app
        self.tokens: dict[int, list[int]] = {}  # line -> prompt and answer

    def start(self, line, prompt):
        output = self.app(
            input_ids=torch.tensor([prompt]),
            position_ids=torch.arange(len(prompt))[None],
            seq_ids=torch.tensor([line]),
            sampling_params=prepare_sampling_params(1),
        )
        self.tokens[line] = [*prompt, int(output.logits[0, -1].argmax())]

    def step(self, *lines):
        output = self.app(
            input_ids=torch.tensor([self.tokens[line][-1:] for line in lines]),
            position_ids=torch.tensor([[len(self.tokens[line]) - 1] for line in lines]),
            seq_ids=torch.tensor(lines),
        )
        for row, line in enumerate(lines):
            self.tokens[line].append(int(output.logits[row, -1].argmax()))


@pytest.fixture
def requests(tiny_llama, application, monkeypatch):
    """Factory of (reference model, requests) on three cache lines under a version."""

    def make(version, **options):
        monkeypatch.setenv("NEURON_CPU_NXDI", version)
        model, folder = tiny_llama()
        options = {"batch_size": 3, "ctx_batch_size": 1, "is_continuous_batching": True, **options}
        return model, Requests(application(folder, **options))

    return make


def alone(model, prompt, got):
    return [*prompt, *greedy.alone(model, prompt, len(got) - len(prompt))[0].tolist()]


each = pytest.mark.parametrize("version", VERSIONS)


visits = st.lists(  # a prompt, tokens of its answer, rounds before it comes
    st.tuples(
        st.lists(st.integers(3, 207), min_size=2, max_size=20), st.integers(1, 7), st.integers(0, 6)
    ),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("version", [full(VERSIONS[0]), *VERSIONS[1:]])
def test_whoever_comes_and_goes_each_gets_its_text_alone(requests, version):
    """More requests than lines, of any length, at any time, on any free line, rows in any order
    that the version takes."""
    model, live = requests(version)

    @settings(max_examples=10, deadline=None)
    @given(visits, st.randoms(use_true_random=False))
    def comes_and_goes(visits, chosen):
        live.tokens.clear()
        waiting = sorted(visits, key=lambda visit: visit[2])
        running: dict[int, tuple[list[int], int]] = {}
        rounds = 0
        while waiting or running:
            free = [line for line in range(3) if line not in running]
            if free and waiting and waiting[0][2] <= rounds:
                prompt, most, _ = waiting.pop(0)
                line = chosen.choice(free)
                running[line] = prompt, len(prompt) + most
                live.start(line, prompt)
            for line, (prompt, length) in list(running.items()):
                if len(live.tokens[line]) == length:
                    assert live.tokens[line] == alone(model, prompt, live.tokens[line])
                    del running[line], live.tokens[line]
            lines = sorted(running)
            if version == "0.1" or len(lines) < 3:
                chosen.shuffle(lines)
            if lines:
                live.step(*lines)
                assert all(len(live.tokens[line]) <= running[line][1] for line in lines)
            rounds += 1

    comes_and_goes()


def test_0_1_takes_a_whole_batch_in_any_order_and_later_versions_only_by_line(requests):
    model, live = requests("0.1")
    for line, prompt in zip((2, 0, 1), PROMPTS):
        live.start(line, prompt)
    live.step(2, 0, 1)
    for line, prompt in zip((2, 0, 1), PROMPTS):
        assert live.tokens[line] == alone(model, prompt, live.tokens[line])
    _, live = requests("0.6")
    for line, prompt in zip((2, 0, 1), PROMPTS):
        live.start(line, prompt)
    with pytest.raises(ValueError, match=r"seq_ids \[2, 0, 1\], expected.*ascending"):
        live.step(2, 0, 1)


@each
def test_a_line_that_a_device_would_have_damaged_is_not_read(requests, version):
    """The row that fills the place of the longer line 0 lands on one of its tokens."""
    _, live = requests(version)
    live.start(0, PROMPTS[0])
    live.start(1, PROMPTS[1])
    live.step(1)
    place = 0 if version == "0.1" else len(PROMPTS[1])
    with pytest.raises(ValueError, match=f"id 0 goes on.*overwritten its position {place} "):
        live.step(0, 1)
    live.start(0, PROMPTS[2])  # a new prompt makes the line whole
    live.step(0, 1)


@pytest.mark.parametrize("lines", [(1, 1), (0, 3), (-1, 0)])
def test_lines_that_the_cache_lacks_or_that_occur_twice_are_refused(requests, lines):
    _, live = requests("0.1")
    live.tokens = {line: [5, 6] for line in lines}
    with pytest.raises(ValueError, match="different numbers from 0 to 2"):
        live.step(*lines)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"ctx_batch_size": 2}, "ctx_batch_size is 2, expected 1"),
        ({"kv_cache_padding_size": 1}, "3 lines and 1 of padding"),
        ({"kv_cache_batch_size": 4}, "4 lines and 0 of padding"),
    ],
)
def test_what_the_graphs_here_lack_is_refused(requests, option, message):
    with pytest.raises(NotImplementedError, match=message):
        requests("0.6", **option)
