"""Prompts over the workers of a cluster, and several submissions beside each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.errors import UserError
from harness.experiments import remote, spread
from harness.experiments.remote import Outcome, Task
from harness.inputs import command_line
from harness.modes import evaluate_all
from tests.conftest import REPOSITORY
from tests.tiny_model import write_tiny_model

PLAIN = (
    "from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaForCausalLM\n"
)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--mode", "evaluate", "--llama", "a.py", "b.py"], "--llama takes one submission in"),
        (["--mode", "evaluate_all", "--record-baseline", "--workers", "2"], "measures one base"),
        (["--mode", "evaluate_all", "--record-baseline", "--llama", "a", "b"], "measures one base"),
        (["--mode", "generate", "--workers", "2"], "--workers works with --mode evaluate_all"),
    ],
)
def test_what_cannot_be_compared_or_spread_is_refused(arguments, told):
    with pytest.raises(UserError, match=told):
        command_line.parse(arguments)


@pytest.mark.parametrize("value", ["0", "-1", "host", ":8786", "host:", "host:port", "a b:c"])
def test_addresses_that_are_none(value, capsys):
    with pytest.raises(SystemExit):
        command_line.parse(["--mode", "evaluate_all", f"--workers={value}"])
    assert "--workers" in capsys.readouterr().err


def test_addresses_and_submissions():
    parsed = command_line.parse(["--mode", "evaluate_all", "--llama", "a.py", "b.py"])
    assert (parsed.llama, parsed.contestants, parsed.workers) == ("a.py", ("a.py", "b.py"), None)
    for value in ("3", "tcp://host:8786", "10.0.0.1:8786"):
        parsed = command_line.parse(["--mode", "evaluate_all", "--workers", value])
        assert parsed.workers == value and parsed.contestants == ("llama",)


def test_without_dask_the_mend_is_told(monkeypatch):
    monkeypatch.setattr(spread.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="--workers needs Dask, .* run `pip install"):
        next(spread.evaluated("2", []))


def work(index=3):
    session = SimpleNamespace(submission=Path("x/mine.py"))
    return spread.Work(SimpleNamespace(session=session), SimpleNamespace(index=index))


class Done(SimpleNamespace):
    __hash__ = object.__hash__


def future(error):
    return Done(exception=lambda: error, result=lambda: Outcome(refusal="no"))


def test_what_becomes_of_a_task():
    assert spread._outcome(future(None), work()) == Outcome(refusal="no")
    with pytest.raises(UserError, match="cannot import this project .*PYTHONPATH="):
        spread._outcome(future(ModuleNotFoundError("harness")), work())
    with pytest.raises(UserError, match="Prompt 3 of mine.py was given up: it dies; --resume"):
        spread._outcome(future(RuntimeError("it\ndies.")), work())


def test_a_lost_worker_is_told(monkeypatch, capsys):
    states = iter([{"tcp://a:1": 0, "tcp://b:2": 0}, {"tcp://b:2": 0}])
    client = SimpleNamespace(scheduler_info=lambda: {"workers": next(states)})
    works = {future(None): work(), future(None): work()}
    rounds = iter([set(), set(works)])
    finished = SimpleNamespace(wait=lambda *a, **k: SimpleNamespace(done=next(rounds)))
    monkeypatch.setitem(sys.modules, "distributed", finished)
    finished.TimeoutError = TimeoutError
    assert len(list(spread._as_they_come(client, works))) == 2
    told = "Worker tcp://a:1 is lost; others do its prompts (1 are left)."
    assert told in capsys.readouterr().err


def test_another_checkout_on_a_worker_is_refused(monkeypatch):
    task = Task(None, "a.py", b"", {}, "other", {}, None)
    with pytest.raises(RuntimeError, match="other sources of this project"):
        spread.carry_out(task)
    monkeypatch.setattr(spread, "code_digest", lambda: "other")
    monkeypatch.setattr(spread._beside, "ask", lambda asked: asked)
    assert spread.carry_out(task) is task


def test_the_process_beside_a_worker_is_started_again_and_tells_why_it_fails(monkeypatch):
    """A process that ends fails its task only; one that answers with an error raises it."""
    beside = spread._Beside()
    ends = "import sys; sys.stdin.buffer.read(1); sys.exit(7)"
    fails = "import pickle, sys; pickle.dump(RuntimeError('no'), sys.stdout.buffer)"
    real = subprocess.Popen
    for code, told in ((ends, "ended with 7"), (fails, "^no$")):
        monkeypatch.setattr(
            spread.subprocess,
            "Popen",
            lambda _, code=code, **given: real([sys.executable, "-c", code], **given),
        )
        with pytest.raises(RuntimeError, match=told):
            beside.ask(Task(None, "a.py", b"", {}, "", {}, None))
        beside._process.wait()


def test_a_model_stays_for_its_next_prompt_and_its_refusal_too(monkeypatch):
    built = []

    def session(_, task):
        built.append(task.submission)
        raise UserError("not this one")

    monkeypatch.setattr(remote.Evaluators, "_session", session)
    evaluators = remote.Evaluators()
    for name, index in (("a", 0), ("a", 1), ("b", 1)):
        case = SimpleNamespace(index=index)
        task = Task(None, name, b"", {}, "", {}, case)
        assert evaluators.outcome(task) == Outcome(refusal="not this one")
    assert built == ["a", "b"]


def test_resuming_takes_finished_submissions_as_they_are(tmp_path):
    asked = {"inputs": "1"}
    first = evaluate_all._open_run(tmp_path, True, asked, finished=True)
    (first / "report.json").write_text("{}")
    assert evaluate_all._open_run(tmp_path, True, asked, finished=True) == first
    assert evaluate_all._open_run(tmp_path, True, {"inputs": "2"}, finished=True) != first
    assert evaluate_all._open_run(tmp_path, False, asked, finished=True) != first


def results_of(folder):
    """Submission -> prompt -> result, of the one run of each."""
    found = {}
    for path in folder.glob("*/*/prompt-*.json"):
        content = json.loads(path.read_text())
        assert content["id"] not in found.setdefault(path.parent.parent.name, {})
        found[path.parent.parent.name][content["id"]] = content
    return found


@pytest.mark.full
def test_a_worker_that_is_killed_midway_loses_nothing(tmp_path):
    """Two submissions, six prompts each, two workers, of which one is killed while it evaluates."""
    distributed = pytest.importorskip("distributed")
    model = write_tiny_model(tmp_path / "tiny")
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "prompts.txt").write_text("\n\n".join(f"prompt {i}" for i in range(6)))
    options = ["--model-path", model, "--prompt-file", tmp_path / "prompts.txt"]
    options += ["--max-new-tokens", "4", "--llama", "llama", tmp_path / "plain.py"]

    def command(folder, *more):
        arguments = [*options, "--results-path", tmp_path / folder, *more]
        return [sys.executable, str(REPOSITORY / "test.py"), *map(str, arguments)]

    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None
    ) as cluster:
        run = subprocess.Popen(command("spread", "--workers", cluster.scheduler_address))
        while not any(results_of(tmp_path / "spread").values()):
            assert run.poll() is None
            time.sleep(0.05)
        with distributed.Client(cluster) as client:
            victim = next(iter(client.run(os.getpid).values()))
        os.kill(victim, signal.SIGKILL)
        assert run.wait(timeout=600) in (0, 1)
    assert subprocess.run(command("alone"), timeout=600).returncode == run.returncode
    spread_out, alone = results_of(tmp_path / "spread"), results_of(tmp_path / "alone")
    assert {name: sorted(found) for name, found in spread_out.items()} == {
        name: list(range(6)) for name in ("llama", "plain")
    }
    for name, found in alone.items():
        for index, result in found.items():
            other = spread_out[name][index]
            for key in ("error", "accurate", "score"):
                assert other.get(key) == result.get(key), (name, index)
    boards = [
        json.loads((tmp_path / f / "leaderboard.json").read_text()) for f in ("spread", "alone")
    ]
    assert boards[0] == boards[1] and [one["prompts"] for one in boards[0]] == [6, 6]
