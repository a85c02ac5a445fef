"""diff finds the module that is wrong; preflight refuses what must not be uploaded."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, Olmo2Config

from harness.modes import preflight
from tests.crossed import full
from tests.tiny_model import TINY_CONFIG, _write_byte_tokenizer

# The SDK's Llama whose MLP goes through a kernel that multiplies by FACTOR.
SCALED = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
from neuronx_distributed_inference.models.config import NeuronConfig
from neuronx_distributed_inference.models.llama import modeling_llama

modeling_llama.plain_mlp = getattr(modeling_llama, "plain_mlp", modeling_llama.NeuronLlamaMLP)


@nki.jit
def scale_kernel(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    nl.store(out_hbm, nl.multiply(nl.load(x_hbm), FACTOR))
    return out_hbm


class ScaledMLP(modeling_llama.plain_mlp):
    def __init__(self, config, *arguments, **settings):
        super().__init__(config, *arguments, **settings)
        self.scales = config.neuron_config.nki_enabled

    def forward(self, hidden, *arguments, **settings):
        out, *rest = super().forward(hidden, *arguments, **settings)
        if self.scales:
            out = scale_kernel(out.reshape(-1, out.shape[-1])).view(out.shape)
        return (out, *rest)


modeling_llama.NeuronLlamaMLP = ScaledMLP


class NKIConfig(NeuronConfig):
    def __init__(self, **settings):
        self.nki_enabled = settings.pop("enable_nki", settings.pop("nki_enabled", False))
        super().__init__(**settings)


class Config(modeling_llama.NeuronLlamaForCausalLM.get_config_cls()):
    @classmethod
    def get_neuron_config_cls(cls):
        return NKIConfig


class NeuronLlamaForCausalLM(modeling_llama.NeuronLlamaForCausalLM):
    @classmethod
    def get_config_cls(cls):
        return Config
"""
LOOPED = SCALED.replace("FACTOR", "1.0").replace(
    "    return out_hbm\n",
    "    n = 0\n    for k in nl.affine_range(1):\n        BODY\n    assert BEHIND >= 0\n"
    "    return out_hbm\n",
)


@pytest.fixture
def run(run_main, tiny_model, tmp_path):
    def call(mode, text="", *arguments):
        chosen: tuple = ()
        if text:
            path = tmp_path / "entry.py"
            path.write_text(text)
            chosen = ("--llama", path)
        return run_main(
            "--mode",
            mode,
            "--model-path",
            tiny_model,
            "--prompt",
            "hello there",
            *["--seq-len", "64", "--tp-degree", "1"],
            *chosen,
            *arguments,
            XDG_CACHE_HOME=str(tmp_path),
        )

    return call


@pytest.mark.full  # 7 s
def test_diff_clears_the_submission_on_two_ranks(run):
    """Of two prompts, the second one behind a chunk, whose kernel is compared, too."""
    long = "--prompt", "hello there once again and again"
    sizes = "--max-context-length", "16", "--prefill-chunk", "8"
    done = run("diff", "", "--tp-degree", "2", *long, *sizes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("No operator is more than 3 times farther") == 2
    assert "layers.1 " in done.stdout and "decode" in done.stdout
    assert "attention_chunk_kernel" in done.stdout


@pytest.mark.full
def test_diff_clears_a_cache_in_fp8(run):
    """The kernels' cache stands for the other path's, too."""
    done = run("diff", "", "--kv-cache-quant")
    assert done.returncode == 0, done.stderr
    assert "No operator is more than 3 times farther" in done.stdout


@pytest.mark.full  # 5 s
def test_diff_clears_a_family_without_norms_in_front(run, tmp_path):
    """The kernels take None in the place of a norm, and so do PyTorch's modules."""
    torch.manual_seed(0)
    changes = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    config = Olmo2Config(**{**TINY_CONFIG, **changes})
    folder = tmp_path / "olmo2"
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    _write_byte_tokenizer(folder)
    done = run("diff", "", "--model-path", folder)
    assert done.returncode == 0, done.stderr
    assert "No operator is more than 3 times farther" in done.stdout


@pytest.mark.parametrize(
    ("factor", "told"),
    [
        ("1.05", "The error starts in layers.0.mlp (prefill)"),
        full("float('inf')", "not finite comes out of layers.0.mlp (prefill) first, at element"),
    ],
)
def test_diff_names_the_wrong_kernel_and_its_line(factor, told, run):
    done = run("diff", SCALED.replace("FACTOR", factor))
    assert done.returncode == 1, done.stderr
    line = SCALED[: SCALED.index("def scale_kernel")].count("\n") + 1
    assert told in " ".join(done.stdout.split())
    assert f"scale_kernel (entry.py:{line})" in " ".join(done.stdout.split())


def test_diff_of_a_checkpoint_with_nan_says_so(run, tiny_model, tmp_path):
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, model / "model.safetensors")
    done = run("diff", "", "--model-path", model)
    assert done.returncode == 1, done.stderr
    told = "Nothing can be compared: layers.1.mlp (prefill) is not finite in fp32 either"
    assert told in done.stdout


def test_preflight_passes_the_submission(run):
    done = run("preflight")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("[ok]") == 4 and done.stdout.endswith("Ready for the upload.\n")
    assert "[--] provenance: " in done.stdout and " seen on device, " in done.stdout


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        (SCALED.replace("FACTOR", "1.5"), "[FAILED] accurate"),
        full(SCALED.replace("FACTOR", "1.0"), "[FAILED] NKI share"),
        full(
            SCALED.replace("FACTOR", "1.0").replace("nl.multiply(", "nl.nothing("), "[FAILED] comp"
        ),
        full(
            LOOPED.replace("BODY", "pass").replace("BEHIND", "k"),
            "a device's compiler refuses it: ",
        ),
        (LOOPED.replace("BODY", "n = n + 1").replace("BEHIND", "n"), "[sim_loop_rebinding]"),
    ],
    ids=["inaccurate", "no product in a kernel", "does not trace", "refused", "unproven"],
)
def test_preflight_fails_what_must_not_be_uploaded(run, text, failed):
    done = run("preflight", text)
    assert done.returncode == 1, done.stdout + done.stderr
    assert failed in done.stdout and "Not ready" in done.stdout and "Traceback" not in done.stderr
    last = done.stdout.splitlines()[-1]
    assert ("python main.py --enable-nki --mode diff --" in last) == ("accurate" in failed)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import scipy.linalg\nimport os, json", "scipy"),
        ("from . import kernels", "line 1 imports relatively"),
        ("x = 1\npath = '/somewhere/harness/files'", "line 2 names harness"),
        ("import neuronx_distributed.trace, torch.nn\nfrom neuronxcc import nki", None),
    ],
)
def test_stands_alone(tmp_path, text, told):
    path = tmp_path / "entry.py"
    path.write_text(text)
    if told is None:
        assert "neuronxcc" in preflight.stands_alone(path)
        return
    with pytest.raises(preflight.CheckFailed, match=told):
        preflight.stands_alone(path)
