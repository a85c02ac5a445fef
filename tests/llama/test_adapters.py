"""Low-rank adapters in the kernels, several in one batch, each as peft has it on Hugging Face."""

from types import SimpleNamespace

import pytest
import torch
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from models import adapters, extended, ranks, weights
from models.quantised import check_quantised
from tests import greedy
from tests.adapters import continued
from tests.llama.every import llama
from tests.tiny_model import SMALL

# peft, which makes the adapters from a model without a folder
pytestmark = pytest.mark.filterwarnings(
    "ignore:Could not find a config file", "ignore:Setting `save_embedding_layers`"
)

ALL = [*llama.ATTENTION_TARGETS, *llama.MLP_TARGETS]
SHAPE = SMALL | dict(intermediate_size=136, num_attention_heads=6, num_key_value_heads=2)
PROMPTS = [[7, 3, 9, 11, 200, 45, 6], [5, 6, 7], [9, 8, 150, 31, 77]]
STEPS = 4


def adapted(model, folder, seed, **config):
    """An adapter that peft has made and saved, its B not zero."""
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ALL, "init_lora_weights": False, **config}
    peft = get_peft_model(LlamaForCausalLM(model.config), LoraConfig(**options))
    peft.save_pretrained(str(folder))
    return folder


def reference(checkpoint, adapter, tokens):
    """Logits behind each token, by transformers and peft."""
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0]


@pytest.fixture
def serving(tmp_path, monkeypatch):
    """Factory of (checkpoint, adapters' folders, application) with kernels."""
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))

    def make(adapters, version="0.6", shape=None, lora=None, **neuron):
        monkeypatch.setenv("NEURON_CPU_NXDI", version)
        model = greedy.seeded(LlamaConfig(**SHAPE | (shape or {})))  # A is multiplied by gains
        model.save_pretrained(tmp_path / "checkpoint")
        made = {
            name: adapted(model, tmp_path / name, seed, **config)
            for seed, (name, config) in enumerate(adapters.items(), 1)
        }
        config = {"max_loras": len(made), "max_lora_rank": 1, **(lora or {})}
        config["lora_ckpt_paths"] = {name: str(path) for name, path in made.items()}
        options = {"seq_len": 32, "max_context_length": 16, "torch_dtype": "float32"}
        options |= {"enable_nki": True, "lora_config": config, **neuron}
        path = tmp_path / "checkpoint"
        app = llama.NeuronLlamaForCausalLM(
            str(path),
            llama.LlamaInferenceConfig(
                llama.NeuronConfigNKI(**options), load_config=load_pretrained_config(str(path))
            ),
        )
        app.compile(tmp_path / "compiled")
        app.load(tmp_path / "compiled")
        return path, made, app

    return make


def assert_each_as_peft(checkpoint, made, app, names):
    """A batch whose rows have adapters of these names, "0" for none: logits within 1e-4 of the
    largest."""
    text, logits = greedy.logits(app, PROMPTS, STEPS, adapter_ids=names)
    for row, (prompt, name) in enumerate(zip(PROMPTS, names, strict=True)):
        got, tokens = logits[row], [*prompt, *text[row].tolist()]
        expected = reference(checkpoint, made.get(name), tokens)[len(prompt) - 1 : -1]
        assert (got - expected).abs().max() / expected.abs().max() < 1e-4
        base = reference(checkpoint, None, tokens)[len(prompt) - 1 : -1]
        changes = (got - base).abs().max() / base.abs().max() > 1e-2
        assert changes == (name != "0")


@pytest.mark.libraries
@pytest.mark.parametrize("tp_degree", [1, 2])
def test_a_batch_of_three_adapters(serving, tp_degree):
    """Ranks 4 and 20, one for attention's queries and values only, and a row without any."""
    adapters = {"one": {}, "two": {"r": 20, "target_modules": ["q_proj", "v_proj"]}}
    checkpoint, made, app = serving(adapters, batch_size=3, tp_degree=tp_degree)
    assert_each_as_peft(checkpoint, made, app, ["two", "0", "one"])


@pytest.mark.libraries
@pytest.mark.parametrize(
    ("adapter", "shape"),
    [
        ({"use_rslora": True, "target_modules": llama.MLP_TARGETS}, {}),
        ({"target_modules": ["o_proj", "k_proj"]}, {"num_key_value_heads": 1}),
        ({"r": 70}, {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 128}),
    ],
    ids=["rank-stabilised, MLP only", "a KV head on both ranks", "more ranks than partitions"],
)
def test_ranks_scales_and_heads(serving, adapter, shape):
    """Two adapters of the kind on two ranks; those of 3 heads leave a rank with a zero head."""
    adapters = {"one": adapter, "two": adapter}
    checkpoint, made, app = serving(adapters, "0.6", shape=shape, batch_size=3, tp_degree=2)
    assert_each_as_peft(checkpoint, made, app, ["two", "0", "one"])


@pytest.mark.libraries
def test_adapters_follow_their_requests_through_continuous_batching(serving):
    """Prompts one by one, then fewer rows than the batch, in another order than their lines."""
    options = {"batch_size": 3, "is_continuous_batching": True, "ctx_batch_size": 1}
    checkpoint, made, app = serving({"one": {}, "two": {}}, **options)
    names = {2: "two", 0: "one"}
    for line, tokens, logits in continued(app, names, PROMPTS, 3):
        expected = reference(checkpoint, made[names[line]], tokens)[-1]
        assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_layers_get_numbers_where_a_release_hands_them_rows():
    """NxDI 0.7 does, as it keeps each row's adapters."""
    manager = type("Manager", (), {"update_lora_adapter_ids": lambda self, numbers, rows: rows})()
    model = type("Model", (), {"lora_weight_manager": manager})()
    llama.keep_numbers(model)
    assert manager.update_lora_adapter_ids([2, 0], [0, 1]) == [2, 0]


@pytest.mark.libraries
def test_adapters_that_the_kernels_do_not_take_are_refused(serving, tmp_path):
    with pytest.raises(ValueError, match="changes embed_tokens, expected some of q_proj"):
        serving({"one": {"target_modules": ["q_proj", "embed_tokens"]}})
    checkpoint = tmp_path / "checkpoint"
    other = LlamaForCausalLM(LlamaConfig(**SHAPE | {"intermediate_size": 100}))
    config = llama.LlamaInferenceConfig(
        llama.NeuronConfigNKI(
            lora_config={"lora_ckpt_paths": {"one": str(adapted(other, tmp_path / "one", 1))}}
        ),
        load_config=load_pretrained_config(str(checkpoint)),
    )
    state = LlamaForCausalLM.from_pretrained(checkpoint).model.state_dict()
    with pytest.raises(ValueError, match=r"lora_A \[4, 100\] for layers.0.mlp.down_proj.*136 feat"):
        llama.add_adapters(dict(state), config)
    tensors = load_file(str(tmp_path / "one" / "adapter_model.safetensors"))
    save_file(tensors, str(tmp_path / "one" / "adapter_model.safetensors"))  # without metadata
    assert len(list(llama.read_adapter(str(tmp_path / "one")))) == len(tensors)
    named = {key.replace("lora_A", "lora_magnitude_vector"): t for key, t in tensors.items()}
    save_file(named, str(tmp_path / "one" / "adapter_model.safetensors"))
    with pytest.raises(ValueError, match="has a tensor base_model.*train it on those"):
        llama.add_adapters(dict(state), config)


class Reader:
    """NxDI's reader of adapters, over tensors by the names of its layers."""

    def __init__(self, tensors):
        self._get_module_checkpoint = lambda name, _: tensors.get(name)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("heads", "degree"), [((4, 2), 4), ((6, 2), 4), ((3, 3), 2), ((4, 2), 2)])
def test_heads_of_adapters_in_pytorch_lie_as_those_of_weights(heads, degree, later):
    """The library's reader left replicas and padded heads without their adapter, silently."""
    dim, rank, hidden = 4, 3, 10
    config = SimpleNamespace(
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=dim,
        hidden_size=hidden,
        intermediate_size=8 * degree,
        vocab_size=8 * degree,
        neuron_config=SimpleNamespace(tp_degree=degree),
    )
    widths = {"q_proj": heads[0] * dim, "k_proj": heads[1] * dim, "v_proj": heads[1] * dim}
    tensors, products = {}, {}
    for name, width in (*widths.items(), ("o_proj", heads[0] * dim)):
        n, k = (hidden, width) if name == "o_proj" else (width, hidden)
        a, b = torch.randn(rank, k), torch.randn(n, rank)
        inside = name if name == "o_proj" else f"qkv_proj.{name}"
        tensors |= {f"self_attn.{inside}.lora_A": a, f"self_attn.{inside}.lora_B": b}
        products[f"self_attn.{name}.weight"] = b @ a
    model = SimpleNamespace(lora_checkpoint=Reader(tensors))
    model = SimpleNamespace(lora_weight_manager=model) if later else model
    adapters.spread_adapters(model, config)
    read = getattr(model, "lora_weight_manager", model).lora_checkpoint._get_module_checkpoint
    weights.spread_heads(products, "self_attn.", heads[1], weights.SharedSizes.of(config))
    for name in ("qkv_proj.q_proj", "qkv_proj.k_proj", "qkv_proj.v_proj", "o_proj"):
        a, b = (read(f"self_attn.{name}.lora_{kind}", None) for kind in "AB")
        expected = products[f"self_attn.{name.split('.')[-1]}.weight"]
        torch.testing.assert_close(b @ a, expected)
    assert read("mlp.up_proj.lora_A", None) is None


def test_adapters_are_chosen_for_all_of_a_sharded_sequence(monkeypatch):
    """They were chosen for the tokens of a rank, and the sequence was not gathered then."""
    layer = object.__new__(extended.ExtendedLayer)
    torch.nn.Module.__init__(layer)
    lora = SimpleNamespace(max_loras=2, max_lora_rank=3)
    layer.config = SimpleNamespace(neuron_config=SimpleNamespace(lora_config=lora))
    layer.self_attn = None
    layer.nki_enabled = True
    monkeypatch.setattr(
        ranks, "gather_from_sequence_parallel_region", lambda x, dim: torch.cat([x, x], dim)
    )
    # The class that this layer inherits: other tests load a second `llama`.
    plain = next(kind for kind in type(layer).__mro__ if kind.__module__ == "llama")
    monkeypatch.setattr(plain, "forward", lambda self, hidden, **_: (hidden,))
    given = {"position_ids": torch.zeros(1, 8), "adapter_ids": torch.tensor([2])}
    (columns,) = layer(torch.ones(1, 4, 5), **given)
    assert columns.shape == (1, 8, 5) and columns.chosen.shape[1] == columns.stream.shape[1]
    assert columns.chosen.sum(0).tolist() == [3] * 8
    with pytest.raises(ValueError, match="gets no adapter_ids"):  # graphs over blocks, 0.4 to 0.6
        layer(torch.ones(1, 4, 5), position_ids=torch.zeros(1, 8))


@pytest.mark.parametrize("kernels", [False, True])
def test_what_layers_in_pytorch_take_for_something_else_is_refused(kernels):
    """Biases beside adapters, which NxDI does not find, and f8e5m2, which it takes for int8."""
    lora = SimpleNamespace(lora_memory_transpose=True)
    of_neuron = SimpleNamespace(
        nki_enabled=kernels, lora_config=lora, quantized=True, quantization_dtype="f8e5m2"
    )
    config = SimpleNamespace(model_type="qwen2", neuron_config=of_neuron)
    for check, said in ((adapters.check_adapters, "biases"), (check_quantised, "f8e5m2 is int8")):
        if kernels:
            check(config)
            continue
        with pytest.raises(ValueError, match=said):
            check(config)
    of_neuron.windowed_context_encoding_size = None  # of 0.7 and later
    check_quantised(config)
