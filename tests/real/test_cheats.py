"""Submissions that cheat over the real NxD Inference 0.6: what runs is held against the trace."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.harness.figures import test_executed
from tests.real import releases
from tests.real.test_contracts import FOLDER, checkouts

pytestmark = checkouts
# A graph keeps nothing of Python. So what cheats there replaces what is loaded, or answers itself.
OTHER_GRAPH = """
from neuron_cpu.runtime import tape

own = tape.Tape.run
calls = []
def run(self, inputs, weights, states):
    made = own(self, inputs, weights, states)
    {act}
    return made
tape.Tape.run = run
"""
ACTS = {
    "by an operator": ("made[0].mul(2)", "PyTorch's mul"),
    "in numpy": ("made[0].float().numpy()", "numpy ran"),
    "by a product": ("inputs[0].float() @ inputs[0].float().mT", "the product"),
    "from a call on": ("calls.append(1); len(calls) > 12 and made[0].mul(2)", "PyTorch's mul"),
}


@pytest.fixture(scope="module")
def evaluate(tiny_model, tmp_path_factory):
    place = tmp_path_factory.mktemp("real")
    environment = releases.environment(releases.RELEASES["0.6"], Path(FOLDER))

    def run(text, *arguments):
        (place / "entry.py").write_text(text)
        command = [
            *[sys.executable, str(REPOSITORY / "main.py"), "--mode", "evaluate", "--llama"],
            *["entry.py", "--enable-nki", "--prompt", "hello", "--seq-len", "64"],
            *["--max-new-tokens", "8", "--model-path", str(tiny_model), *arguments],
        ]
        given = environment | {"XDG_CACHE_HOME": str(place / "cache"), "OMP_NUM_THREADS": "1"}
        given["PYTHONPATH"] = os.pathsep.join([given["PYTHONPATH"], str(REPOSITORY)])
        done = subprocess.run(
            command, cwd=place, env=given, capture_output=True, text=True, timeout=900
        )
        assert "NxD Inference 0.6" in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert (done.returncode == 0) == ("Accuracy: True" in done.stdout), done.stderr
        return " ".join(done.stdout.split())

    return run


def test_the_honest_submission_has_a_score(evaluate):
    assert "Final Score" in evaluate("from llama import *")


def test_attention_that_is_traced_as_two_linear_kernels_is_inaccurate(evaluate):
    """What is traced is what runs: nothing tells the two apart inside of a graph."""
    told = evaluate(test_executed.TWO_LINEAR)
    assert "FAILED" in told or "NaN" in told, told


def test_an_answer_of_the_host_fails_by_name(evaluate):
    told = evaluate(test_executed.ON_THE_HOST)
    assert "the logits of a step are computed on the host" in told, told


@pytest.mark.parametrize("act", ACTS)
def test_work_that_was_not_traced_fails_by_name(act, evaluate):
    source, name = ACTS[act]
    told = evaluate("from llama import *\n" + OTHER_GRAPH.replace("{act}", source))
    assert name in told and "as it was traced" in told, told
