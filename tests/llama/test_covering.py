"""The driver takes the files beside llama.py exactly where llama.py alone refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

import llama
from harness.inputs import command_line, submission
from harness.model_shapes import MODEL_SHAPES

OWN = submission.REPOSITORY / "llama.py"
ONE_B = MODEL_SHAPES["llama-3.2-1b"]
CASES = {
    "the contest": ([], {}, True),
    "in float32": (["--torch-dtype", "float32"], {}, True),
    "a batch": (["--batch-size", "4"], {}, True),
    "prompts padded on the left": (["--padding-side", "left", "--batch-size", "2"], {}, False),
    "left padding of heads of 80": (["--padding-side", "left"], dict(head_dim=80), False),
    "a degree that does not divide the heads": (["--tp-degree", "16"], {}, False),
    "sequence parallel": (["--sequence-parallel-enabled"], {}, False),
    "heads of 128": ([], dict(head_dim=128), True),
    "PyTorch's heads of 80": (None, dict(head_dim=80), True),
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
    "integers": (["--quantize", "int8"], {}, False),
    "a cache in fp8": (["--kv-cache-quant"], {}, False),
    "guesses": (["--prompt-lookup-num-tokens", "2"], {}, False),
    "prompts in chunks": (
        ["--seq-len", "640", "--max-context-length", "128", "--prefill-chunk", "64"],
        {},
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_llama_refuses_the_extended_file_gets(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.1")
    more, changes, alone = CASES[name]
    config = ONE_B | changes
    arguments = ["--mode", "generate"]
    arguments += ["--tp-degree", "2"] if not more or "--tp-degree" not in more else []
    arguments += [] if more is None else ["--enable-nki", *more]
    settings = command_line.parse(arguments)
    if settings.quantized:
        settings = replace(settings, quantized_checkpoints_path=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = False
    try:
        options = {"torch_dtype": settings.torch_dtype, **settings.neuron_config()}
        options |= {"nki_enabled": settings.enable_nki}
        neuron_config = llama.NeuronConfigNKI(**options)
        read = llama.LlamaInferenceConfig(
            neuron_config, load_config=load_pretrained_config(str(tmp_path))
        )
        if settings.enable_nki:
            llama.check_kernels(read)
    except (TypeError, ValueError, NotImplementedError) as error:
        refused = True
        assert "models/extended.py" in str(error) or "do not cover" in str(error), error
    assert refused != alone
    chosen = submission.covering(OWN, settings, config)
    assert chosen == (OWN if alone else OWN.parent / "models" / "extended.py")


def test_a_file_of_somebody_else_is_taken_as_it_is(tmp_path: Path) -> None:
    settings = command_line.parse(["--mode", "generate", "--seq-len", "4096", "--enable-nki"])
    assert submission.covering(tmp_path / "llama.py", settings, ONE_B) == tmp_path / "llama.py"
