"""Several tokens a step: the text of one token a step, in fewer calls."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from neuronx_distributed_inference.contract import VERSIONS

from harness.errors import UserError
from harness.figures import benchmark
from harness.figures.estimated_speed import SpeedEstimates
from harness.inputs import command_line, submission
from harness.processes.worker import Host, Job
from harness.processes.workers import SubmissionFailed
from harness.session import adapters, speculation
from harness.session import model as session_model
from harness.settings import Speculation
from tests.crossed import full
from tests.tiny_model import write_tiny_model

LENGTH = 64
REPEATING = [7, 30, 91, 11, 200, 7, 30, 91, 11, 5, 7, 30]


class Running:
    """A model, and its draft where one is asked for, as the driver's worker builds them."""

    def __init__(self, folder, scratch, *more, role="torch"):
        arguments = ["--mode", "generate", "--model-path", str(folder), "--torch-dtype", "float32"]
        arguments += ["--seq-len", str(LENGTH), "--tp-degree", "1", *more]
        arguments += ["--enable-nki"] if role == "nki" else []
        settings = command_line.parse(arguments)
        job = Job(
            settings, folder, 0, None, submission.find("models.extended"), scratch, None, False
        )
        self.host, self.role = Host(job, lambda step: self.steps.append(step)), role
        self.steps: list = []
        self.calls: dict[str, int] = {}
        draft = settings.speculation is not None and settings.speculation.own_draft is not None
        for one in (role, "draft") if draft else (role,):
            session_model.construct(self.host, one)
            session_model.load(self.host, one, scratch / session_model.compile(self.host, one))
        for wrapper in self.host.models[role].models:
            wrapper.register_forward_hook(lambda module, *_: self._count(module.tag))

    def _count(self, tag):
        self.calls[tag] = self.calls.get(tag, 0) + 1

    def tokens(self, prompt, new_tokens=16):
        self.steps.clear()
        answer = session_model.generate(
            self.host, self.role, [prompt], new_tokens, False, True, False
        )
        self.body = answer.body
        return [step[0] for step in self.steps]

    def scores(self, prompt, new_tokens=16):
        """The logits [new_tokens, 1, V] of greedy tokens."""
        answer = session_model.generate(
            self.host, self.role, [prompt], new_tokens, True, True, True
        )
        return answer.arrays[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another model of the same vocabulary."""
    return write_tiny_model(tmp_path_factory.mktemp("other"), seed=1, num_hidden_layers=1)


@pytest.fixture(autouse=True)
def private_work_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "nxd_model") + "/")


METHODS = {
    "lookup": ("--prompt-lookup-num-tokens", "4"),
    "same draft": ("--speculation-length", "4", "--draft-model-path", "tiny"),
    "other draft": ("--speculation-length", "4", "--draft-model-path", "other"),
}


def arguments(method, tiny, other):
    folders = {"tiny": str(tiny), "other": str(other)}
    return [folders.get(argument, argument) for argument in METHODS[method]]


# Of every combination, the one that runs by default.
QUICK = ("0.6", "other draft", "torch", 1)
CASES = [(v, m, r, 1) for v in VERSIONS for m in METHODS for r in ("nki", "torch")]
CASES += [
    (v, m, r, 2) for v in VERSIONS for m in ("lookup", "other draft") for r in ("nki", "torch")
]


@pytest.mark.parametrize(
    ("version", "method", "role", "degree"), [c if c == QUICK else full(*c) for c in CASES]
)
def test_text_is_that_of_one_token_a_step(
    tiny, other, tmp_path, monkeypatch, version, method, role, degree
):
    """To the last place of the cache; since 0.2 there is no single-token graph to end with."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    ranks = "--tp-degree", str(degree)
    plain = Running(tiny, tmp_path, role=role)
    expected = plain.tokens(REPEATING, LENGTH - len(REPEATING))
    found = Running(tiny, tmp_path, *arguments(method, tiny, other), *ranks, role=role)
    assert found.tokens(REPEATING, LENGTH - len(REPEATING)) == expected
    calls = benchmark.checked_calls(found.body, 5, len(expected))
    target = sum(found.calls.values())
    assert target == 1 + len(calls)
    if method == "same draft":
        assert len(calls) <= 1 + -(-(len(expected) - 1) // 4)
        assert all(agreed == guessed for guessed, agreed, _ in calls)
    if method == "lookup":
        assert target < len(expected)
    assert hasattr(found.host.models[role], "token_generation_model") == (version == "0.1")


@pytest.mark.parametrize("method", ["lookup", full("other draft")])
def test_draws_of_a_seed_are_those_of_plain_sampling(tiny, other, tmp_path, method):
    asked = "--do-sample", "--top-k", "20", "--temperature", "1.3", "--seed", "5"
    expected = Running(tiny, tmp_path, *asked).tokens(REPEATING)
    found = Running(tiny, tmp_path, *asked, *arguments(method, tiny, other))
    assert found.tokens(REPEATING) == expected
    assert found.tokens(REPEATING) == expected  # nothing is left of the first generation


@pytest.mark.parametrize(
    "body",
    [
        None,
        [[1, 2, 0]],  # more right than guessed
        [[5, 1, 0], [0, 0, 0]],  # more guesses than a call takes
        [[2, 1, 0]],  # too few tokens
        [[2, 2, 0], [2, 2, 0]],  # too many
        [[2, 1, -1], [1, 0, 0]],
        [[2.0, 1, 0], [1, 0, 0]],
    ],
)
def test_calls_that_do_not_give_the_tokens_are_refused(body):
    assert benchmark.checked_calls([[2, 1, 0], [1, 0, 0]], 5, 4)
    with pytest.raises(SubmissionFailed, match="no calls that give 4 tokens"):
        benchmark.checked_calls(body, 5, 4)


class Fused:
    """An adapter around a graph that has guessed: what the graph gives is given here."""

    _scores, behind = speculation.InGraph._scores, speculation.InGraph.behind

    beside: dict = {}

    def __init__(self, outputs, logits):
        self.neuron_config = SimpleNamespace(output_logits=logits)
        self.config = SimpleNamespace(vocab_size=10)
        self.steps, self._eagle, self.outputs = [], False, outputs

    def __call__(self, **inputs):
        assert inputs["input_ids"].tolist() == [[3]] and inputs["position_ids"].tolist() == [[2]]
        assert inputs["attention_mask"].tolist() == [[1, 1]]
        return SimpleNamespace(fused_outputs=self.outputs)

    def step(self):
        return speculation.InGraph._step(self, torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("release", ["0.1", "later"])
def test_a_right_guess_behind_a_wrong_one_counts_as_wrong(release):
    """5, 9, 7 are guessed and 5, 6, 7 right: one guess counts, and the target's 6 behind it."""
    drafted, target = torch.tensor([[5, 9, 7, 8]]), torch.tensor([[5, 6, 7, 2]])
    tokens = [drafted, target]
    if release == "later":  # accepted, next ids, mask and positions, which the graph has counted
        tokens = [target, target[:, 1:2], torch.ones(1, 4), torch.tensor([[4]])]
    taken, scores = Fused(tokens, logits=False).step()
    assert taken == [5] and scores.argmax(-1).tolist() == [5, 6]
    logits = torch.randn(1, 4, 10)
    taken, scores = Fused([*tokens, torch.randn(1, 4, 10), logits], logits=True).step()
    assert taken == [5] and torch.equal(scores, logits[0, :2])


def test_every_call_of_several_tokens_has_the_adapter():
    """They went without, so the text was that of the model itself, silently."""
    paths = {"one": "a", "two": "b"}
    lora = SimpleNamespace(lora_ckpt_paths=paths)
    model = SimpleNamespace(config=SimpleNamespace(neuron_config=SimpleNamespace(lora_config=lora)))
    assert adapters.named(model, ["two", "0"]).tolist() == [2, 0]
    model.lora_model_manager = SimpleNamespace(lora_config=SimpleNamespace(max_loras=3))
    assert adapters.named(model, ["two", "one", "0"]).tolist() == [1, 0, 2]  # 0.7 and later
    calls = []

    class Calls(speculation.Speculative):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.steps, self.beside, self.neuron_model = [], {}, model

        def forward(self, **given):
            calls.append(given["adapter_ids"].tolist())
            return SimpleNamespace(logits=torch.eye(4)[given["input_ids"][0] % 4][None])

        def _step(self, ids):
            return [], self.behind(ids[:, -1:], ids.shape[1] - 1).logits[0]

    asked = SimpleNamespace(do_sample=False, return_dict_in_generate=False)
    Calls()._sample(
        torch.tensor([[1, 2]]),
        lambda _, row: row,
        lambda ids, _: torch.tensor(ids.shape[1] > 4),
        asked,
        adapter_ids=["two"],
    )
    assert calls == [[1]] * 3


def test_a_draft_has_no_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    given = ["--mode", "generate", "--lora-ckpt-path", f"one:{tmp_path}"]
    command_line.parse([*given, "--speculate", "lookup"])
    for way in (["--speculate", "draft", "--draft-model-path", "d"], ["--is-medusa"]):
        with pytest.raises(UserError, match="got --lora-ckpt-path"):
            command_line.parse([*given, *way])


def test_acceptance_is_counted_by_position():
    found = benchmark.summed(
        "lookup", 4, [([[3, 3, 0], [0, 0, 0], [2, 1, 0]], 8), ([[3, 0, 0]], 2)]
    )
    assert (found.calls, found.unguessed, found.tokens) == (4, 1, 8)
    assert (found.offered, found.accepted) == ([3, 3, 2], [2, 1, 1])
    assert found.tokens_per_call == 2.0
    assert "67% of 3, 33% of 3, 50% of 2" in found.describe()


@pytest.mark.parametrize("alone", [False, True])
def test_a_token_costs_its_share_of_a_step(alone):
    """Ten calls, four of them without a guess, give 25 tokens; the draft ran 20 steps."""
    asked = Speculation("draft", 5, Path("draft"))
    tags = [asked.submodel, *(["token_generation_model"] if alone else [])]
    costs = {asked.submodel: 10.0, "token_generation_model": 5.0}
    estimates, draft = (object.__new__(SpeedEstimates) for _ in range(2))
    session = SimpleNamespace(settings=SimpleNamespace(speculation=asked))
    estimates._loaded = SimpleNamespace(session=session, buckets=dict.fromkeys(tags))
    asked_for = []

    def graph(submodel, length):
        asked_for.append((submodel, length))
        return np.full(3, costs[submodel])

    estimates._graph, estimates._draft = graph, draft
    draft._graph = lambda submodel, length: np.ones(3)
    measured = benchmark.Acceptance("draft", 5, 10, 4, 25, [6] * 4, [5, 4, 3, 3], 20)
    several = 0.6 * 10 + 0.4 * 5 if alone else 10.0
    assert estimates._token(100, measured)[0] == pytest.approx((several + 2 * 1.0) / 2.5)
    assert asked_for[0] == (asked.submodel, 104)
