"""The driver with a Qwen3-MoE: its folder, the class that is run, and modes."""

import json

import pytest

from harness.errors import UserError
from harness.inputs import models, submission
from tests.conftest import REPOSITORY
from tests.crossed import full
from tests.tiny_model import write_tiny_model

EXPERTS = dict(
    model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], head_dim=128, hidden_size=256,
    num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=4,
    moe_intermediate_size=64, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1,
)  # fmt: skip


@pytest.fixture
def tiny(tmp_path):
    return write_tiny_model(tmp_path / "tiny", **EXPERTS)


def test_a_folder_is_checked_by_the_form_of_its_type(tiny):
    shapes = models.expected_shapes(models.check_folder(tiny))
    assert shapes["model.layers.1.mlp.experts.3.down_proj.weight"] == [256, 64]
    config = json.loads((tiny / "config.json").read_text())
    for change, told in (
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is above num_experts 8"),
        ({"num_experts": 9}, "mlp.gate.weight .* expected shape .9, 256."),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"num_experts": None}, "num_experts"),
        ({"model_type": "mamba"}, "of type 'mamba', expected one of llama, "),
        ({"model_type": ["llama"]}, "expected one of llama"),
    ):
        (tiny / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=told):
            models.check_folder(tiny)


def test_a_submission_for_another_type_is_refused():
    path = REPOSITORY / "models" / "qwen3_moe.py"
    assert submission.load(path, "qwen3_moe").NeuronQwen3MoeForCausalLM
    with pytest.raises(UserError, match="does not define NeuronLlamaForCausalLM, .* 'llama'"):
        submission.load(path, "llama")


MODES = ["generate", "validate", "evaluate", "evaluate_all", "diff", "profile", "preflight"]


@pytest.mark.parametrize("mode", [m if m == "validate" else full(m) for m in MODES])
def test_modes_run(mode, tiny, tmp_path, run_main, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    arguments = ["--mode", mode, "--enable-nki", "--llama", REPOSITORY / "models" / "qwen3_moe.py"]
    arguments += ["--model-path", tiny]
    if mode != "profile":
        arguments += ["--prompt", "Hello there"]
    if mode not in ("profile", "diff"):
        arguments += ["--max-new-tokens", "4"]
    done = run_main(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_platform_is_refused(tiny, tmp_path, run_main, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    arguments = [
        "--mode",
        "generate",
        "--enable-nki",
        "--llama",
        REPOSITORY / "models" / "qwen3_moe.py",
    ]
    done = run_main(*arguments, "--model-path", tiny, "--prompt", "Hello", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "for trn2 and trn3: set NEURON_PLATFORM_TARGET_OVERRIDE" in done.stderr
