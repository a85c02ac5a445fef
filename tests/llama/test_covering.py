"""llama.py says what it does not cover, its kernels agree, and the driver takes its word."""

import json
import random
from dataclasses import replace

import pytest
import torch
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

import llama
from harness.inputs import command_line, models, submission
from harness.model_shapes import MODEL_SHAPES
from harness.processes.workers import Workers
from harness.session.opening import Session
from tests.crossed import full
from tests.llama.program_hashes import of_case

OWN = submission.REPOSITORY / "llama.py"
ONE_B = MODEL_SHAPES["llama-3.2-1b"]
CASES = {
    "the contest": ([], {}, True),
    "in float32": (["--torch-dtype", "float32"], {}, True),
    "a batch": (["--batch-size", "4"], {}, True),
    "prompts padded on the left": (["--padding-side", "left", "--batch-size", "2"], {}, False),
    "left padding of heads of 80": (["--padding-side", "left"], dict(head_dim=80), False),
    "a degree that does not divide the heads": (["--tp-degree", "16"], {}, False),
    "heads of 128": ([], dict(head_dim=128), True),
    "a server of the embedded model": (
        ["--mode", "serve", "--seq-len", "2048", "--max-context-length", "512", "--tp-degree", "1"],
        MODEL_SHAPES["smollm2-135m"],
        False,
    ),
    "a batch of eight over 2048 keys": (["--seq-len", "2048", "--batch-size", "8"], {}, False),
    "PyTorch's heads of 80": (None, dict(head_dim=80), True),
    "PyTorch's KV heads that NxDI shares out": (None, dict(num_key_value_heads=1), True),
    "PyTorch's KV heads that NxDI loses": (
        None,
        dict(num_attention_heads=6, num_key_value_heads=3),
        False,
    ),
    "heads of 80": ([], dict(head_dim=80), False),
    "Qwen": ([], dict(model_type="qwen2"), False),
    "Mistral in PyTorch": (None, dict(model_type="mistral", sliding_window=100), False),
    "biases": ([], dict(attention_bias=True), False),
    "a long cache": (["--seq-len", "4096"], {}, False),
    "a cache that SBUF does not hold": (
        ["--seq-len", "2048", "--tp-degree", "1"],
        dict(num_key_value_heads=32, head_dim=128),
        False,
    ),
    "a batch of caches without room": (
        ["--seq-len", "2048", "--batch-size", "2", "--tp-degree", "1"],
        dict(head_dim=128),
        False,
    ),
    "a cache in fp8": (["--kv-cache-quant"], {}, False),
    "guesses": (["--prompt-lookup-num-tokens", "2"], {}, False),
    "prompts in chunks": (
        ["--seq-len", "640", "--max-context-length", "128", "--prefill-chunk", "64"],
        {},
        False,
    ),
}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The file that runs, for settings and a model's config.json."""
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.1")
    workers = Workers()

    def source(settings, config, path=OWN):
        (tmp_path / "config.json").write_text(json.dumps(config))
        settings = replace(settings, isolate=False, tp_degree=settings.tp_degree or 2)
        model = models.ModelFolder(tmp_path, "model", config)
        return Session(settings, model, path, None, 0, workers=workers).source

    yield source
    workers.close()


@pytest.mark.parametrize("name", CASES)
def test_what_llama_does_not_cover_the_extended_file_gets(name, asked):
    more, changes, alone = CASES[name]
    arguments = ["--mode", "generate", *([] if more is None else ["--enable-nki", *more])]
    found = asked(command_line.parse(arguments), ONE_B | changes)
    assert found == (OWN if alone else OWN.parent / "models" / "extended.py")


def test_a_file_of_somebody_else_is_taken_as_it_is(tmp_path, asked):
    settings = command_line.parse(["--mode", "generate", "--seq-len", "4096", "--enable-nki"])
    assert asked(settings, ONE_B, tmp_path / "llama.py") == tmp_path / "llama.py"


def shapes(count):
    """Models and settings around the limits of SBUF, seeded."""
    draw, found = random.Random(50), []
    while len(found) < count:
        heads = draw.choice([8, 16, 32])
        config = ONE_B | dict(
            hidden_size=draw.choice([512, 1024, 2048, 4096]),
            head_dim=draw.choice([64, 128]),
            num_attention_heads=heads,
            num_key_value_heads=draw.choice([2, 4, 8, heads]),
            intermediate_size=1024,
            vocab_size=1024,
            num_hidden_layers=1,
        )
        length = draw.choice([128, 640, 1024, 2048])
        asked = dict(
            tp_degree=draw.choice([1, 2]),
            batch_size=draw.choice([1, 2, 4, 8]),
            seq_len=length,
            max_context_length=draw.choice([64, length]),
            torch_dtype=draw.choice(["bfloat16", "float32"]),
        )
        found.append((config, asked))
    return found


# The others take up to 5 s each; 11 is near what SBUF holds.
BRIEF = (1, 8)


@pytest.mark.parametrize("number", [n if n in BRIEF else full(n) for n in range(12)])
def test_the_kernels_agree_with_what_llama_says(number, tmp_path, monkeypatch):
    """Whatever it says that it covers is traced and fits SBUF; what it leaves, the other takes."""
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.1")
    config, asked = shapes(12)[number]
    (tmp_path / "config.json").write_text(json.dumps(config))
    dtype = getattr(torch, asked["torch_dtype"])
    neuron_config = llama.NeuronConfigNKI(enable_nki=True, **(asked | {"torch_dtype": dtype}))
    read = load_pretrained_config(str(tmp_path))
    why = llama.LlamaInferenceConfig(neuron_config, load_config=read).uncovered()
    if why is not None:
        with pytest.raises(ValueError, match="do not cover"):
            [*of_case(llama, config, asked)]
        return
    assert all(programs for _, programs, _ in of_case(llama, config, asked))
