"""Quantised weights and caches: the SDK's checkpoints, layers and casts, against float ones."""

import itertools
import os
import shutil

import pytest
import torch
import torch.nn.functional as F
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.quantised import (
    QuantizationType,
    QuantizedColumnParallel,
    QuantizedDtype,
    convert,
    direct_cast_quantize,
    qconfig_of,
    quantize_fp8_per_channel,
    quantize_fp8_per_tensor,
    quantize_int8,
)
from neuronx_distributed_inference.contract import VERSIONS
from neuronx_distributed_inference.models.config import NeuronConfig
from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaForCausalLM
from safetensors.torch import load_file, save_file
from torch import nn

from neuron_cpu.errors import CheckpointError
from neuron_cpu.runtime.ranks import Group, rank_context
from tests import greedy
from tests.sdk.test_generation import PROMPTS, assert_same_as_reference
from tests.sdk.test_parallel_layers import get_padding_length, run_sharded, tensors

FP8 = torch.float8_e4m3fn
PER_TENSOR, PER_CHANNEL = "per_tensor_symmetric", "per_channel_symmetric"
SCHEMES = [(kind, dtype) for kind in (PER_TENSOR, PER_CHANNEL) for dtype in ("int8", "f8e4m3")]
BY_DEFAULT = [
    (PER_CHANNEL, "int8", VERSIONS[0]),
    (PER_TENSOR, "f8e4m3", VERSIONS[0]),
    (PER_CHANNEL, "f8e4m3", VERSIONS[-1]),
]
IN_FULL = [
    pytest.param(*scheme, version, marks=pytest.mark.full)
    for scheme in SCHEMES
    for version in VERSIONS
    if (*scheme, version) not in BY_DEFAULT
]
WEIGHT_LIKE = {
    ("int8", PER_TENSOR): lambda weight: quantize_int8(weight, per_channel=False),
    ("int8", PER_CHANNEL): lambda weight: quantize_int8(weight, per_channel=True),
    ("f8e4m3", PER_TENSOR): lambda weight: quantize_fp8_per_tensor(weight, FP8),
    ("f8e4m3", PER_CHANNEL): lambda weight: quantize_fp8_per_channel(weight, FP8, 0),
}


def test_weights_are_within_half_a_step():
    (weight,) = tensors((19, 23))
    weight[3] *= 100
    weight[5] = 0
    quantised, scale = quantize_int8(weight, per_channel=True)
    assert scale.shape == (19, 1)
    assert bool(((weight - quantised.float() * scale).abs() <= scale / 2 * 1.0001).all())
    quantised, scale = quantize_fp8_per_channel(weight, FP8, 0)
    error = (weight - quantised.float() * scale).abs()
    # 3 mantissa bits: half a step is 1/16 of the value, or of the least normal number 2^-6
    assert bool((error <= (weight.abs() / 16).clamp_min(2**-7 * scale[:, :1]) * 1.0001).all())
    assert float(quantised.float().abs().max()) == 240.0
    quantised, scale = quantize_fp8_per_channel(weight, FP8, 0, floor=0.0)
    assert float(scale[5]) == 0 and not bool(quantised[5].float().any())
    assert quantize_fp8_per_tensor(weight, FP8)[1].shape == ()


@pytest.mark.parametrize(("kind", "dtype"), SCHEMES)
@pytest.mark.parametrize("degree", [1, 2])
def test_layers_scale_the_product(kind, dtype, degree):
    """Column and row, with a padded size and a bias, after `convert` of float layers."""
    config = qconfig_of(kind, QuantizedDtype.INT8 if dtype == "int8" else QuantizedDtype.F8E4M3)
    x, weight, bias = tensors((2, 3, 21), (19, 21), (19,))
    quantised, scale = WEIGHT_LIKE[dtype, kind](weight)
    checkpoint = {"layer.weight": quantised, "layer.scale": scale, "layer.bias": bias}
    expected = F.linear(x, quantised.float() * scale, bias)
    parts = list(F.pad(x, (0, get_padding_length(21, degree))).chunk(degree, dim=-1))
    for build, given in (
        (lambda: ColumnParallelLinear(21, 19, pad=True), x),
        (lambda: RowParallelLinear(21, 19, pad=True, input_is_parallel=True), parts),
    ):

        def converted(build=build):
            return convert(nn.ModuleList([build()]), config, inplace=True)[0]

        for result in run_sharded(degree, converted, checkpoint, given):
            torch.testing.assert_close(result, expected)


def test_layers_refuse_what_they_do_not_do():
    one_rank = rank_context(Group(0, 1))
    with one_rank, pytest.raises(NotImplementedError, match="quantised activations"):
        QuantizedColumnParallel(4, 4, activation_quantization_type="dynamic")
    one_rank = rank_context(Group(0, 1))
    with one_rank, pytest.raises(AssertionError, match="per_channel_axis is 1"):
        QuantizedColumnParallel(
            4,
            4,
            quantization_type=QuantizationType.PER_CHANNEL_SYMMETRIC,
            quantization_per_channel_axis=1,
        )


def options(path, kind=PER_CHANNEL, dtype="int8", **more):
    return {
        "quantized": True,
        "quantized_checkpoints_path": str(path),
        "quantization_type": kind,
        "quantization_dtype": dtype,
        **more,
    }


def quantise(folder, path, **asked):
    """Write the quantised checkpoint of a folder, as a user does."""
    from neuronx_distributed_inference.models.llama.modeling_llama import LlamaInferenceConfig
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    config = LlamaInferenceConfig(
        NeuronConfig(**options(path, **asked)), load_config=load_pretrained_config(str(folder))
    )
    NeuronLlamaForCausalLM.save_quantized_state_dict(str(folder), config)


def dequantised(model, state):
    """The Hugging Face model with the weights that a quantised checkpoint stands for."""
    untied = model.config.tie_word_embeddings
    if untied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    for name, module in model.named_modules():
        key = name.removeprefix("model.")
        if type(module) is nn.Linear and f"{key}.scale" in state:
            weight = state[f"{key}.weight"].float() * state[f"{key}.scale"]
            module.weight = nn.Parameter(weight, requires_grad=False)
    return model


@pytest.mark.parametrize(("kind", "dtype", "version"), BY_DEFAULT + IN_FULL)
def test_generation_from_a_quantised_checkpoint(
    tiny_llama, application, monkeypatch, tmp_path, kind, dtype, version
):
    """Tied and of 3 KV heads at degree 2, which are padded: equal to the dequantised model."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama(
        tie_word_embeddings=True, num_attention_heads=9, num_key_value_heads=3, hidden_size=72
    )
    path = tmp_path / "quantised"
    path.mkdir()
    quantise(folder, path, kind=kind, dtype=dtype)
    assert os.listdir(path) == ["model.safetensors"]
    state = load_file(path / "model.safetensors")
    scales = {key for key in state if key.endswith(".scale")}
    assert len(scales) == 2 * 7 + 1 and "lm_head.scale" in scales
    assert state["embed_tokens.weight"].dtype is torch.float32
    app = application(folder, tp_degree=2, **options(path, kind, dtype))
    model = dequantised(model, state)
    assert_same_as_reference(model, app, prompts=PROMPTS[:1], steps=5)


def test_fused_projections_and_listed_modules(tiny_llama, application, monkeypatch, tmp_path):
    """A tied head that is left in float, from a pickle whose scales have another tool's name."""
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    model, folder = tiny_llama(tie_word_embeddings=True)
    path, asked = tmp_path / "quantised.pt", {"modules_to_not_convert": ["lm_head", "layers.0"]}
    quantise(folder, path, **asked)
    state = torch.load(path)
    assert not any(key.startswith(("lm_head.scale", "layers.0.mlp.up_proj.s")) for key in state)
    renamed = {key.replace(".scale", ".weight_scale"): value for key, value in state.items()}
    torch.save(renamed, path)
    app = application(folder, tp_degree=2, fused_qkv=True, **options(path, **asked))
    model = dequantised(model, state)
    assert_same_as_reference(model, app, prompts=PROMPTS[:1], steps=5)


def test_quantised_checkpoints_that_do_not_fit(tiny_llama, application, tmp_path):
    """Each is one sentence, and leaves no compiled folder."""
    _, folder = tiny_llama()
    path = tmp_path / "quantised"
    path.mkdir()
    quantise(folder, path)
    file, key = path / "model.safetensors", "layers.1.mlp.up_proj"
    whole = {name: tensor.clone() for name, tensor in load_file(file).items()}

    def refused(message, change=None, target=path, **asked):
        save_file(whole | (change or {}), file)
        with pytest.raises((CheckpointError, FileNotFoundError), match=message):
            application(folder, load=False, **options(target, **asked))
        assert not (folder / "compiled").exists()

    refused("does not exist", target=tmp_path / "nothing")
    refused("holds no scales, so it is not quantised", target=folder)
    refused("expected a weight of torch.float8_e4m3fn", dtype="f8e4m3")
    refused(r"of shape \[\d+, 1\], expected \[1\]", kind=PER_TENSOR)
    refused(r"of shape \[51, 1\], expected \[52, 1\]", {f"{key}.scale": torch.ones(51, 1)})
    refused("NaN, infinite or negative", {f"{key}.scale": torch.full((52, 1), -1.0)})
    refused("scale in torch.int8, expected scales", {f"{key}.scale": whole[f"{key}.scale"].char()})
    alone = whole.pop(f"{key}.scale")
    refused(f"{key}.weight in torch.int8 without a scale, expected {key}.scale")
    whole[f"{key}.scale"] = alone
    refused("beside a weight of torch.float32", {f"{key}.weight": torch.ones(52, 48)})
    refused("has the zero point", {f"{key}.weight_zero_point": torch.ones(52, 1)})
    shutil.copyfile(folder / "config.json", path / "config.json")
    narrow = {
        f"{key}.weight": torch.ones(50, 48, dtype=torch.int8),
        f"{key}.scale": torch.ones(50, 1),
    }
    refused(r"has shape \[50, ", narrow)


def test_values_beyond_those_of_neurons_e4m3_are_refused(tiny_llama, application, tmp_path):
    """As other tools write them, whose type ends at 448; 240 itself fits."""
    _, folder = tiny_llama()
    path = tmp_path / "quantised"
    path.mkdir()
    quantise(folder, path, dtype="f8e4m3")
    file, key = path / "model.safetensors", "layers.1.mlp.up_proj.weight"
    whole = {name: tensor.clone() for name, tensor in load_file(file).items()}
    assert float(whole[key].float().abs().max()) == 240
    for value in (-256.0, 448.0, float("nan")):
        weight = whole[key].float()
        weight[3, 5] = value
        save_file(whole | {key: weight.to(FP8)}, file)
        with pytest.raises(CheckpointError, match=f"values beyond 240 in {key}"):
            application(folder, load=False, **options(path, dtype="f8e4m3"))
    assert not (folder / "compiled").exists()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"quantization_dtype": "int4"}, "quantization_dtype must be one of int8, f8e4m3"),
        ({"quantization_type": "per_row"}, "per_row"),
        (
            {"modules_to_not_convert": ["lm_head"], "quantization_type": PER_TENSOR},
            "works with quantization_type per_channel",
        ),
        ({"qkv_kernel_enabled": True}, "needs modules_to_not_convert"),
    ],
)
def test_configurations_that_are_refused(monkeypatch, asked, message):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    with pytest.raises((ValueError, AssertionError), match=message):
        NeuronConfig(**(options("somewhere") | asked))


def test_cache_in_fp8(tiny_llama, application):
    """Prefill's logits are exact; those of later steps are a float model's with rounded keys."""
    model, folder = tiny_llama()
    app = application(folder, tp_degree=2, kv_cache_quant=True)
    text, (got,) = greedy.logits(app, PROMPTS[:1], 6)
    _, expected = greedy.alone(model, PROMPTS[0], 6)
    scale = expected.abs().max()
    assert float((got[0] - expected[0]).abs().max() / scale) < 1e-4
    tokens = torch.tensor([PROMPTS[0] + text[0].tolist()])
    second = _with_rounded_cache(model, tokens[:, : len(PROMPTS[0])], tokens[:, len(PROMPTS[0])])
    assert float((got[1] - second).abs().max() / scale) < 1e-4
    assert float((got[1] - expected[1]).abs().max() / scale) > 1e-4  # the cache is rounded


def _with_rounded_cache(model, prompt, token):
    """Logits of a step behind a prompt whose keys and values went through fp8."""
    from transformers import DynamicCache

    cache = DynamicCache()
    model(prompt, past_key_values=cache)
    for layers in (cache.key_cache, cache.value_cache):
        layers[:] = [layer.to(FP8).to(layer.dtype) for layer in layers]
    return model(token[None], past_key_values=cache).logits[0, -1].detach()


def test_cast_to_the_devices_range():
    """Beyond 240, where OCP's type goes on to 448, nothing finite is promised."""
    values = torch.tensor([1.0, -240.0, 247.0, 249.0, -448.0, 1e4])
    cast = direct_cast_quantize(values, FP8).float()
    assert cast[:3].tolist() == [1.0, -240.0, 240.0]
    assert bool(cast[3:].isnan().all())


SUBMISSION = dict(
    hidden_size=576,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=520,
    vocab_size=512,
    tie_word_embeddings=True,
    initializer_range=0.06,
)


def submitted(folder, path, enable_nki, tp_degree, **asked):
    """llama.py on a quantised checkpoint, compiled and loaded."""
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    import models.extended as llama

    neuron_config = llama.NeuronConfigNKI(
        seq_len=64,
        max_context_length=32,
        torch_dtype=asked.pop("torch_dtype", "bfloat16"),
        tp_degree=tp_degree,
        enable_nki=enable_nki,
        **options(path, **asked),
    )
    config = llama.LlamaInferenceConfig(
        neuron_config, load_config=load_pretrained_config(str(folder))
    )
    app = llama.NeuronLlamaForCausalLM(str(folder), config)
    app.compile(folder / "submitted")
    app.load(folder / "submitted")
    return app


QUANTISED = [
    (PER_TENSOR, "f8e4m3", "0.6", 1, {}),
    (PER_CHANNEL, "int8", "0.6", 2, {"modules_to_not_convert": ["up_proj", "layers.1.self"]}),
]
LISTED = PER_CHANNEL, "f8e4m3", "0.6", 1, {"modules_to_not_convert": ["lm_head", "o_proj"]}
KINDS = itertools.product((PER_TENSOR, PER_CHANNEL), ("int8", "f8e4m3"), VERSIONS, (1, 2), ({},))
REST = [pytest.param(*c, marks=pytest.mark.full) for c in (LISTED, *KINDS) if c not in QUANTISED]


@pytest.mark.parametrize(("kind", "dtype", "version", "degree", "more"), QUANTISED + REST)
def test_submission_with_kernels_and_without(
    tiny_llama, monkeypatch, tmp_path, kind, dtype, version, degree, more
):
    """Both round in bf16; weights of one kernel may be quantised in part."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama(**SUBMISSION)
    for name, gain in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.uniform_(gain, 0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    path = tmp_path / "quantised"
    path.mkdir()
    quantise(folder, path, kind=kind, dtype=dtype, **more)
    found = []
    for enable_nki in (True, False):
        app = submitted(folder, path, enable_nki, degree, kind=kind, dtype=dtype, **more)
        found.append(prompt_and_step(app))
    kernels, plain = found
    assert float((kernels - plain)[0].norm() / plain[0].norm()) < 0.03
    assert float(F.cosine_similarity(kernels, plain).min()) > 0.999


def prompt_and_step(app):
    """Logits [2, V] behind a prompt and behind one token more, whichever is the likeliest: among
    the best of random weights the two paths may choose differently."""
    prompt = torch.tensor(PROMPTS[:1])
    mask, places = torch.ones_like(prompt), torch.arange(prompt.shape[1])[None]
    first = app(input_ids=prompt, attention_mask=mask, position_ids=places).logits
    place = torch.tensor([[prompt.shape[1]]])
    step = app(input_ids=torch.tensor([[77]]), attention_mask=mask, position_ids=place).logits
    return torch.cat((first, step)).float().flatten(1)


def test_submission_refuses_what_its_kernels_cannot_multiply(tiny_llama, monkeypatch, tmp_path):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    _, folder = tiny_llama(**SUBMISSION)
    path = tmp_path / "quantised"
    path.mkdir()
    quantise(folder, path)
    with pytest.raises(ValueError, match="quantised weights in a model of float32"):
        submitted(folder, path, True, 1, torch_dtype="float32")
    partly = {"modules_to_not_convert": ["k_proj"]}
    quantise(folder, path, **partly)
    with pytest.raises(ValueError, match="all of them or none quantised"):
        submitted(folder, path, True, 1, **partly)


CACHES = [(v, d) for v in VERSIONS for d in (1, 2)]
CACHES = [pytest.param(*c, marks=[] if c == ("0.6", 1) else pytest.mark.full) for c in CACHES]
