"""A kernel in models of several families: accuracy, masks, refusals, and the command itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from harness import files
from harness.errors import UserError
from harness.figures import estimate as estimating
from harness.inputs import command_line
from harness.modes import swap as mode
from harness.modes.swap import agreement
from harness.processes.worker import Host, Job
from harness.processes.workers import InProcess
from harness.sdk import Source
from harness.swapping import running
from tests.conftest import REPOSITORY
from tests.crossed import full

KERNELS = Path(__file__).parent / "kernels.py"
LENGTH = 512
COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 1, "head_dim": 64}
MODERN = {
    "global_attn_every_n_layers": 2,
    "local_attention": 128,
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", COMMON | GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", COMMON | {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3Model", "Qwen3Config", COMMON | GROUPED),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", COMMON | GROUPED | {"sliding_window": 100}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", COMMON | GROUPED | {"sliding_window": 100}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", COMMON | {"num_key_value_heads": 1}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", COMMON | GROUPED),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        COMMON | GROUPED | {"attention_multiplier": 0.1, "residual_multiplier": 0.22},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 128, "n_layer": 2, "n_head": 2, "vocab_size": 300},
    ),
    "bert": ("BertModel", "BertConfig", COMMON),
    "modernbert": ("ModernBertModel", "ModernBertConfig", COMMON | MODERN),
    "t5": ("T5Model", "T5Config", {"d_model": 64, "d_ff": 64, "num_layers": 1, "num_heads": 1}),
}


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """Seeded tiny models, made when they are asked for."""
    root = tmp_path_factory.mktemp("families")

    def make(name):
        if not (root / name).is_dir():
            model, config, sizes = FAMILIES[name]
            torch.manual_seed(0)
            made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
            made.save_pretrained(root / name)
        return root / name

    return make


def host_of(folder, kernel, at, *more):
    """What the kernel's process has, in this one."""
    source = kernel if ":" in kernel else f"{KERNELS}:{kernel}"
    settings = command_line.parse(
        ["--mode", "swap", "--model-path", str(folder), "--kernel", source, "--at", at, *more]
    )
    assert settings.swap is not None
    job = Job(settings, folder, 0, None, settings.swap.source, Path(), None, False)
    return Host(job, [].append)


def tried(host, lengths, length=LENGTH, estimate=False):
    """Agreement of the kernel with the reference, and what the calls of attention hide."""
    rows = np.random.default_rng(1).integers(1, 300, (len(lengths), length))
    ids = [[*row[:own].tolist(), *[0] * (length - own)] for row, own in zip(rows, lengths)]
    at = running.asked_of(host).at
    running.check(host)
    kept = running.reference(host, ids, lengths, at)
    found = running.measure(host, ids, lengths, kept.body, True, 1)
    if estimate:
        told = estimating.swapped(host, ids, lengths, kept.body, True)
        assert not told["why_not"] and 0 < told["ms"][1] <= told["ms"][0] <= told["ms"][2]
    return agreement(found.arrays, kept.arrays, lengths), kept.body


LLAMA = f"{REPOSITORY / 'llama.py'}:"
# family, kernel, place, rows, what the layers hide
CASES = [
    ("llama", "flash_fwd", "attention", [512, 200], ["causal"] * 2),
    full("bert", "flash_fwd", "attention", [512, 77], ["bias"] * 2),
    ("qwen3", "rms_norm", "rmsnorm", [512], []),
    full("gemma3", "rms_norm", "rmsnorm", [512], []),
    full("llama", LLAMA + "attention_prefill_kernel", "attention", [512, 33], ["causal"] * 2),
    ("llama", LLAMA + "swiglu_mlp_kernel", "mlp", [512], []),
    full("phi3", "swiglu", "mlp", [512], []),
    full("granite", "flash_fwd", "attention", [512, 99], ["causal"] * 2),
    full("olmo2", "plain_attention", "attention", [512], ["causal"] * 2),
    full("bert", "plain_attention", "attention", [512], ["full"] * 2),
    full("llama", "adapter", "attention", [512, 99], ["causal"] * 2),
    full("llama", "norm_adapter", "rmsnorm", [512], []),
    full("gpt2", "flash_fwd", "attention", [512], ["causal"] * 2),
    full("gemma2", "flash_fwd", "attention", [512], ["bias", "causal"]),
    full("modernbert", "flash_fwd", "attention", [512, 80], ["bias"] * 2),
    full("modernbert", "flash_fwd", "attention", [512], ["full", "bias"]),
]


@pytest.mark.parametrize(("name", "kernel", "at", "lengths", "hides"), CASES)
def test_kernels_fit_models(name, kernel, at, lengths, hides, family):
    host = host_of(family(name), kernel, at)
    close, found = tried(host, lengths, estimate=min(lengths) < LENGTH)
    assert found == hides
    assert close.least_cosine > 0.9995 and close.mse < 2e-4
    assert close.argmax is None or close.argmax > 0.95


def test_the_model_is_as_before_when_the_kernel_is_gone(family):
    host = host_of(family("qwen3"), "rms_norm", "rmsnorm")
    ids = [[5] * 128]
    before = running.measure(host, ids, [128], [], False, 1).arrays[0]
    running.measure(host, ids, [128], [], True, 1)
    assert np.array_equal(before, running.measure(host, ids, [128], [], False, 1).arrays[0])


def reads_a_value(self, x):
    """An MLP of Llama that takes another branch where all is zero, which no graph can."""
    gate = self.act_fn(self.gate_proj(x))
    return self.down_proj(gate * self.up_proj(x)) if x.abs().max() > 0 else x


@pytest.mark.parametrize(
    ("forward", "kernel", "told"),
    [full(reads_a_value, "plain_attention", "value"), (reads_a_value, "forgets_its_mask", "value")],
)
def test_the_device_runs_what_tracing_refuses(
    forward, kernel, told, family, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", forward)
    job = host_of(family("llama"), kernel, "attention", "--layers", "1", "--runs", "1").job
    rows = np.random.default_rng(1).integers(1, 300, (1, LENGTH)).tolist()
    worker = InProcess(replace(job, scratch=tmp_path))
    asked = job.settings.swap
    assert asked is not None
    kept = running.reference(Host(job, print), rows, [LENGTH], asked.at)
    trial = mode.Trial(job.settings, asked, job.model_path, rows, [LENGTH], kept.body, kept.arrays)
    eager, swapped = (mode._variant(trial, worker, "it", which) for which in (False, True))
    for _, speed in (eager, swapped):
        assert told in speed.why_not and len(speed.runs_s) == 1
        assert 0 < speed.estimate_ms[1] <= speed.estimate_ms[0] <= speed.estimate_ms[2]
    assert eager[0].least_cosine > 0.9995
    assert (swapped[0].least_cosine > 0.9995) == (kernel == "plain_attention")
    assert mode._verdict(asked, swapped[0]) == (kernel == "forgets_its_mask")
    mode.print_ratios(eager[1], swapped[1], Source.SIMULATOR)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("device neuron ran eager and the kernel operator by operator") == 1
    assert told in printed


REFUSALS = [
    ("llama", "nothing", "attention", "no kernel nothing"),
    ("llama", "attend", "attention", "of no form that is known at attention"),
    ("llama", "flash_fwd", "mlp", "of no form that is known at mlp"),
    ("bert", "rms_norm", "rmsnorm", "nothing to replace at rmsnorm"),
    ("bert", "adapter", "attention", "no attention function to replace by an adapter"),
    ("bert", "plain_attention", "attention", "takes no bias"),
    ("gemma2", "swiglu", "mlp", "Gemma2MLP computes no SwiGLU"),
    ("gemma2", LLAMA + "attention_prefill_kernel", "attention", "takes no bias"),
    ("granite", LLAMA + "attention_prefill_kernel", "attention", "by 0.125, expected the model's"),
    ("qwen3", LLAMA + "attention_prefill_kernel", "attention", "norms of queries or keys"),
    ("qwen2", LLAMA + "attention_prefill_kernel", "attention", "no linear layer q_proj without"),
    ("t5", "flash_fwd", "attention", "an encoder with a decoder"),
]


@pytest.mark.parametrize(("name", "kernel", "at", "told"), REFUSALS)
def test_what_does_not_fit_is_refused(name, kernel, at, told, family):
    with pytest.raises(UserError, match=told):
        tried(host_of(family(name), kernel, at), [128, 40], length=128)


def test_a_cap_of_scores_that_a_kernel_leaves_out_is_told_once(family, caplog):
    running._tell_cap.cache_clear()
    tried(host_of(family("gemma2"), "flash_fwd", "attention", "--layers", "1"), [512])
    assert caplog.text.count("caps its scores at 50 and the kernel does not") == 1


def test_lengths_without_a_tile_are_refused(family):
    with pytest.raises(UserError, match="2048 or 1024 or 512, got 640"):
        tried(host_of(family("llama"), "flash_fwd", "attention"), [640], length=640)


def test_a_model_is_cut_to_layers(family):
    host = host_of(family("llama"), "rms_norm", "rmsnorm", "--layers", "1")
    assert len(running.prepared(host, False, 1).model.layers) == 1
    with pytest.raises(UserError, match="--layers must be at most 2 for llama, got 3"):
        running.prepared(host_of(family("llama"), "x", "mlp", "--layers", "3"), False, 1)


def masks(*rows):
    return torch.tensor([[row] for row in rows])


SEEN, NOT = 0.0, torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("mask", "causal", "lengths", "hides"),
    [
        (None, True, [3], "causal"),
        (masks([[SEEN] * 3] * 3), False, [3], "full"),
        (masks([[SEEN, NOT, NOT], [SEEN, SEEN, NOT], [SEEN] * 3]), False, [3], "causal"),
        (masks([[SEEN, NOT, NOT], [SEEN, SEEN, NOT], [SEEN, SEEN, NOT]]), False, [2], "causal"),
        (masks([[SEEN, NOT, NOT], [-0.5, SEEN, NOT], [SEEN] * 3]), False, [3], "bias"),
        (masks([[SEEN] * 3] * 3).bool().logical_not(), False, [3, 2], "full"),
        (torch.zeros(1, 2, 3, 3), False, [3], "bias"),  # heads of their own
        (masks([[SEEN] * 3] * 3, [[SEEN, SEEN, NOT]] * 3), False, [3, 3], "bias"),
    ],
)
def test_what_a_mask_hides(mask, causal, lengths, hides):
    assert running.hidden_keys(mask, causal, lengths, 3) == hides


def test_agreement_by_its_definitions():
    a, b = (
        np.array([[[3.0, 4.0], [1.0, 0.0], [9.0, 9.0]]]),
        np.array([[[4.0, 3.0], [1.0, 0.0], [0, 1]]]),
    )
    found = agreement([a, np.array([[1, 2, 3]])], [b, np.array([[1, 7, 3]])], [2])
    assert (found.mse, found.cosine, found.argmax) == (0.5, pytest.approx((0.96 + 1) / 2), 0.5)
    assert found.least_cosine == pytest.approx(0.96)
    assert agreement([a], [b], [2]).argmax is None
    a[0, 1, 0] = np.nan
    assert not agreement([a], [b], [2]).least_cosine >= -1


def test_references_are_kept_and_damaged_ones_computed_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = files.reference_file({"a": 1})
    assert path != files.reference_file({"a": 2}) and files.read_reference(path) is None
    arrays = [np.arange(6.0, dtype=np.float32).reshape(1, 2, 3), np.ones((1, 2), np.float32)]
    files.write_reference(path, ["causal"], arrays)
    body, kept = files.read_reference(path) or (None, [])
    assert body == ["causal"] and all(map(np.array_equal, kept, arrays))
    path.write_bytes(path.read_bytes()[:200])
    assert files.read_reference(path) is None


@pytest.mark.parametrize(("kernel", "status"), [full("flash_fwd", 0), ("forgets_its_mask", 1)])
def test_the_command_reports_and_fails_beyond_its_threshold(
    kernel, status, run_main, family, tmp_path
):
    arguments = ["--mode", "swap", "--model-path", family("llama"), "--at", "attention"]
    arguments += ["--kernel", f"{KERNELS}:{kernel}", "--batch-size", "2", "--layers", "1"]
    done = run_main(*arguments, XDG_CACHE_HOME=str(tmp_path), COLUMNS="200")
    assert done.returncode == status, done.stderr
    assert "llama, 1 layers: 2 x 512 tokens in bfloat16, against PyTorch in fp32" in done.stdout
    eager, swap = (line.split() for line in done.stdout.splitlines()[3:5])
    assert eager[:2] == ["eager", "PyTorch"] and swap[:3] == [kernel, "at", "attention"]
    assert float(eager[4]) > 0.999 and (float(swap[5]) > 0.999) == (status == 0)
    assert float(swap[-1]) > 0 and "(cost model)." in done.stdout
    told = "expected at least 0.999 (--least-cosine)"
    assert (told in done.stderr) == bool(status)


WRONG = {
    "nothing": ([], "--mode swap needs --kernel FILE:NAME and --at"),
    "no name": (["--kernel", "a.py", "--at", "mlp"], "--kernel must be FILE:NAME"),
    "no file": (["--kernel", "none.py:a", "--at", "mlp"], "none.py does not exist"),
    "two cores": (
        [*["--kernel", f"{KERNELS}:a", "--at", "mlp"], "--tp-degree", "2"],
        "--tp-degree",
    ),
    "elsewhere": (["--mode", "generate", "--kernel", "a.py:b"], "--kernel works with --mode swap"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_arguments_are_one_sentence(case):
    arguments, told = WRONG[case]
    with pytest.raises(UserError, match=told):
        command_line.parse(["--mode", "swap", *arguments])


BAD_INPUTS = [
    (["--seq-len", "4096"], "--seq-len must be at most 2048"),
    (["--prompt", "x" * 600], "has 600 tokens, expected 1 to 512"),
    (
        ["--prompt", "x", "--batch-size", "2"],
        "--batch-size is the number of prompts here, 1, got 2",
    ),
]


@pytest.mark.parametrize(("more", "told"), BAD_INPUTS)
def test_inputs_that_do_not_fit_are_refused(more, told, tiny_model):
    settings = host_of(tiny_model, "flash_fwd", "attention", *more).job.settings
    with pytest.raises(UserError, match=told):
        mode._inputs(settings, tiny_model)
