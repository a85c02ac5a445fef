"""The submission, llama.py, on every NxDI version that the stand-in can be."""

import importlib
from pathlib import Path

import pytest
from neuronx_distributed_inference.contract import VERSIONS
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

from tests import greedy
from tests.crossed import crossed

PROMPTS = [[7, 3, 9, 11, 200, 45, 6], [5, 6, 7]]
# Heads of 64, as Llama has them; three query heads over one key-value head, padded at degree 2.
SHAPE = dict(
    hidden_size=192,
    intermediate_size=200,
    num_attention_heads=3,
    num_key_value_heads=1,
    num_hidden_layers=1,
    vocab_size=212,
    initializer_range=0.1,
)


@pytest.fixture(scope="module")
def submission():
    """With every file beside llama.py, whose kernels for plain operands are those of llama.py."""
    return importlib.import_module("models.extended")


def build(submission, folder, **neuron):
    """The submission's application, compiled and loaded."""
    model_cls = submission.NeuronLlamaForCausalLM
    config_cls = model_cls.get_config_cls()
    options = {"seq_len": 48, "max_context_length": 32, "batch_size": 2, **neuron}
    neuron_config = config_cls.get_neuron_config_cls()(**options)
    config = config_cls(neuron_config, load_config=load_pretrained_config(str(folder)))
    app = model_cls(str(folder), config)
    app.compile(folder / "compiled")
    app.load(folder / "compiled")
    return app


@pytest.mark.parametrize(
    ("enable_nki", "tp_degree", "version"), crossed([False, True], [1, 2], VERSIONS)
)
def test_tokens_of_hugging_face(
    submission, tiny_llama, monkeypatch, version, tp_degree, enable_nki
):
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama(**SHAPE)
    app = build(
        submission, folder, torch_dtype="float32", tp_degree=tp_degree, enable_nki=enable_nki
    )
    greedy.assert_equal(app, model, PROMPTS, 5)


@pytest.mark.parametrize(
    ("enable_nki", "tp_degree", "version"), crossed([False, True], [1, 2], VERSIONS)
)
def test_llama_py_alone(tiny_llama, monkeypatch, version, tp_degree, enable_nki):
    """As it is uploaded: with kernels, and without them in NxDI's own layers; heads of 128 on
    two ranks."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    heads = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    heads["head_dim"] = 64 * tp_degree
    model, folder = tiny_llama(**SHAPE | heads)
    given = dict(torch_dtype="float32", tp_degree=tp_degree, enable_nki=enable_nki)
    greedy.assert_equal(build(importlib.import_module("llama"), folder, **given), model, PROMPTS, 5)


def test_nothing_private_is_imported(submission):
    """Neither closed kernels nor the repository's own packages: the file is uploaded alone."""
    models = Path(submission.__file__).parent
    for path in (models.parent / "llama.py", *models.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for name in ("_private_kernels", "starfish", "neuron_cpu", "harness"):
            assert f"import {name}" not in source, path
            assert f"from {name}" not in source, path
            assert f".{name}" not in source, path


def test_float16_with_left_padding(submission, tiny_llama):
    """Rows of padding stay finite in every layer, where twice a bf16 mask would be infinite."""
    model, folder = tiny_llama(**{**SHAPE, "num_hidden_layers": 2})
    more = dict(torch_dtype="float16", enable_nki=True, max_context_length=48)
    app = build(submission, folder, padding_side="left", **more)
    greedy.assert_equal(app, model, PROMPTS, 4)


def test_a_layout_that_the_layers_cannot_take(submission, tiny_llama):
    neuron_config = submission.NeuronConfigNKI(batch_size=1, seq_len=32)
    neuron_config.k_cache_transposed = True
    _, folder = tiny_llama(**SHAPE)
    with pytest.raises(ValueError, match="k_cache_transposed changes the data .* expected False"):
        submission.LlamaInferenceConfig(
            neuron_config, load_config=load_pretrained_config(str(folder))
        )


@pytest.mark.parametrize(
    ("shape", "neuron", "what"),
    [
        ({"head_dim": 33}, {}, "head_dim 33"),
        ({"attention_bias": True}, {}, "attention_bias"),
        ({"mlp_bias": True}, {}, "mlp_bias"),
        ({"hidden_act": "gelu"}, {}, "hidden_act gelu"),
        ({}, {"batch_size": 129}, "a batch of 129"),
    ],
)
def test_shapes_outside_are_refused(submission, tiny_llama, shape, neuron, what):
    _, folder = tiny_llama(**{**SHAPE, **shape})
    with pytest.raises(ValueError, match=f"kernels do not cover {what}, expected"):
        build(submission, folder, enable_nki=True, **neuron)
