"""The driver as users run it: compile and generate on a two-layer model, and every refusal."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.tiny_model import write_tiny_model

LENGTHS = ("--seq-len", "64", "--max-new-tokens", "6")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache for the module, so that runs of one shape reuse their compiled folder."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def generate(run_main, tiny_model, cache):
    """`main.py --mode generate` on the tiny model; the result must be a success."""

    def run(*arguments):
        done = run_main(
            *["--mode", "generate", "--model-path"],
            tiny_model,
            *LENGTHS,
            *arguments,
            XDG_CACHE_HOME=cache,
        )
        assert done.returncode == 0, done.stderr
        return done

    return run


def test_nki_and_torch_print_the_same_and_the_second_run_reuses(generate):
    arguments = ("--prompt", "hello, world", "--tp-degree", "1")
    with_nki = generate("--enable-nki", *arguments)
    plain = generate(*arguments)
    assert with_nki.stdout == plain.stdout
    assert with_nki.stdout.startswith("Output 0: hello") and "Output 1: world" in with_nki.stdout
    assert "splits at its commas into 2 prompts" in plain.stderr
    assert "stand-in neuron_cpu" in plain.stderr
    assert "context_encoding_model, bucket 64:" in with_nki.stderr
    again = generate("--enable-nki", "--no-stream", *arguments)
    assert again.stdout == with_nki.stdout
    assert "Reusing the compiled" in again.stderr and "Compiling" not in again.stderr


def test_prompt_file_is_verbatim(generate, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('one, "two" $HOME\nthree\n\nfour \\n five\n', encoding="utf-8")
    done = generate("--prompt-file", str(prompts), "--batch-size", "1")
    assert 'Output 0: one, "two" $HOME\nthree' in done.stdout
    assert "Output 1: four \\n five" in done.stdout


def test_compile_prints_where_each_operator_ran(run_main, tiny_model, cache):
    done = run_main(
        *["--mode", "compile", "--enable-nki", "--model-path"],
        tiny_model,
        *["--seq-len", "64"],
        XDG_CACHE_HOME=cache,
    )
    assert done.returncode == 0, done.stderr
    assert "NKI kernel" in done.stdout and "PyTorch" in done.stdout
    assert "token_generation_model, bucket 64" in done.stdout


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


REFUSALS = {
    "no mode": lambda t, m: ([], "--mode"),
    "empty prompt": lambda t, m: (["--prompt", " "], "empty"),
    "long prompt": lambda t, m: (["--prompt", "x" * 70, "--seq-len", "64"], "70 tokens"),
    "one token": lambda t, m: (["--prompt", "x"], "1 token"),
    "beyond the model": lambda t, m: (["--seq-len", "4096"], "2048"),
    "degree": lambda t, m: (["--tp-degree", "3"], "hidden_size = 128"),
    "no folder": lambda t, m: (["--model-path", t / "nowhere"], "nowhere"),
    "compiled path": lambda t, m: (["--compiled-model-path", written(t / "f", "")], "f is not"),
    "no submission": lambda t, m: (["--llama", t / "none.py"], "none.py"),
    "broken import": lambda t, m: (
        [
            "--llama",
            written(t / "s.py", "x = 1\nraise RuntimeError('boom')\nNeuronLlamaForCausalLM"),
        ],
        "line 2, raised RuntimeError: boom",
    ),
    "no draft": lambda t, m: (["--draft-model-path", t / "nowhere"], "nowhere"),
    "draft's words": lambda t, m: (
        ["--draft-model-path", write_tiny_model(t / "draft", vocab_size=330)],
        "another vocabulary, of 330 tokens, expected that of tiny with 320",
    ),
    "no Medusa heads": lambda t, m: (["--is-medusa"], "has no medusa_heads.pt"),
    "the library's alone": lambda t, m: (
        ["--speculate", "fused", "--draft-model-path", m],
        "asks for a draft in the target's graph, expected it to be off",
    ),
    "quantised weights": lambda t, m: (["--quantize", "int8"], "asks for quantised weights"),
    "no EAGLE head": lambda t, m: (
        ["--enable-eagle-speculation", "--draft-model-path", m],
        "holds no EAGLE head for tiny, expected one layer of hidden_size 128 and fc.weight of "
        "[128, 256], got 2 of 128 and no fc.weight",
    ),
    "no class": lambda t, m: (["--llama", written(t / "s.py", "")], "NeuronLlamaForCausalLM"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_are_one_sentence_and_leave_nothing(case, run_main, tiny_model, tmp_path):
    arguments, told = REFUSALS[case](tmp_path, tiny_model)
    defaults = [] if case == "no mode" else ["--mode", "generate"]
    model = [] if "--model-path" in arguments else ["--model-path", tiny_model]
    cache = tmp_path / "cache"
    done = run_main(*defaults, *model, *arguments, XDG_CACHE_HOME=str(cache))
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    refusal = [line for line in done.stderr.splitlines() if line.startswith("main.py: ")]
    assert len(refusal) == 1 and done.stderr.endswith(refusal[0] + "\n")
    assert told in refusal[0]
    assert not cache.exists() or not list(cache.rglob("*"))


def test_what_changed_is_named(run_main, tmp_path):
    model = write_tiny_model(tmp_path / "model")
    own = "from neuronx_distributed_inference.models.llama.modeling_llama import *\n"
    part = written(tmp_path / "part_of_mine.py", own)
    submission = written(tmp_path / "mine.py", "from part_of_mine import *\n")

    def run(*more):
        done = run_main(
            *["--mode", "generate", "--model-path"],
            model,
            "--llama",
            submission,
            *["--prompt", "abcd", "--max-new-tokens", "1", "--compiled-model-path"],
            tmp_path / "c",
            *more,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "(first time)" in run()
    submission.write_text(submission.read_text() + "# edited\n")
    assert "(submission changed)" in run("--seed", "5")
    part.write_text(part.read_text() + "# edited\n")  # a file of its own that it imports
    assert "(submission changed)" in run("--seed", "5")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config, indent=1))
    assert "(settings changed, checkpoint changed)" in run("--seq-len", "100")


def test_torchrun_is_told_that_one_process_runs_all_ranks(run_main, tiny_model, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run_main("--mode", "generate", "--model-path", tiny_model)
    assert result.returncode == 2
    assert result.stderr == (
        "main.py: A launcher has started 2 processes, expected one, which runs all ranks; start "
        "main.py by itself, with --tp-degree 2.\n"
    )


def test_a_package_that_is_missing_is_named_without_a_traceback(tmp_path):
    told = "raise ModuleNotFoundError(\"No module named 'pydantic'\", name='pydantic')\n"
    (tmp_path / "pydantic.py").write_text(told)
    done = subprocess.run(
        [sys.executable, REPOSITORY / "main.py", "--help"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode and done.stdout == ""
    assert done.stderr == (
        "main.py: No module named 'pydantic', expected what README names; pip install pydantic.\n"
    )
