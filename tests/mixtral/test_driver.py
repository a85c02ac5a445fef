"""The driver with a Mixtral: its folder, the class that is run, and every mode."""

from __future__ import annotations

import json

import pytest

from harness.errors import UserError
from harness.inputs import models, submission
from tests.conftest import REPOSITORY
from tests.tiny_model import write_tiny_model

EXPERTS = dict(
    model_type="mixtral",
    architectures=["MixtralForCausalLM"],
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=None,
)


@pytest.fixture
def tiny_mixtral(tmp_path):
    return write_tiny_model(tmp_path / "tiny", **EXPERTS)


def test_a_folder_is_checked_by_the_form_of_its_type(tiny_mixtral):
    model = models.check_folder(tiny_mixtral)
    assert models.expected_shapes(model)["model.layers.1.block_sparse_moe.experts.3.w2.weight"] == [
        128,
        192,
    ]
    config = json.loads((tiny_mixtral / "config.json").read_text())
    for change, told in (
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 is above num_local_experts 4"),
        ({"num_local_experts": 5}, "block_sparse_moe.gate.weight .* expected shape .5, 128."),
        ({"model_type": "mamba"}, "must say one of the model_types llama, .*, got 'mamba'"),
        ({"model_type": ["llama"]}, "must say one of"),
    ):
        (tiny_mixtral / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=told):
            models.check_folder(tiny_mixtral)


def test_a_submission_for_another_type_is_refused():
    path = REPOSITORY / "mixtral.py"
    assert submission.load(path, "mixtral").NeuronMixtralForCausalLM
    with pytest.raises(UserError, match="does not define NeuronLlamaForCausalLM, .* 'llama'"):
        submission.load(path, "llama")


@pytest.mark.full
@pytest.mark.parametrize(
    "mode", ["generate", "validate", "evaluate", "evaluate_all", "diff", "profile", "preflight"]
)
def test_every_mode_runs(mode, tiny_mixtral, tmp_path, run_main):
    arguments = ["--mode", mode, "--enable-nki", "--llama", REPOSITORY / "mixtral.py"]
    arguments += ["--model-path", tiny_mixtral]
    if mode != "profile":
        arguments += ["--prompt", "Hello there"]
    if mode not in ("profile", "diff"):
        arguments += ["--max-new-tokens", "4"]
    done = run_main(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
