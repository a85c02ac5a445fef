"""What compile writes, and what it refuses because the device would fail on it."""

import json
import shutil

import pytest
import torch
from neuronx_distributed_inference.models.llama import modeling_llama
from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaForCausalLM
from neuronx_distributed_inference.modules.checkpoint import load_state_dict
from safetensors.torch import load_file, save_file

from neuron_cpu.errors import CheckpointError, CompileError, StandInError
from tests import greedy

CTE, TKG = "context_encoding_model", "token_generation_model"


def application_with(monkeypatch, application, folder, layer_forward, **options):
    """Compile the baseline with its MLP's forward replaced."""
    monkeypatch.setattr(modeling_llama.NeuronLlamaMLP, "forward", layer_forward)
    return application(folder, load=False, **options)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (lambda x: x.sum().item(), "reads a tensor's value"),
        (lambda x: bool(x.sum() > 0), "reads a tensor's value"),
        (lambda x: x.tolist(), "reads a tensor's value|needs the values"),
        (lambda x: x.nonzero(), "makes a shape from tensor values"),
        (lambda x: x[x > 0], "makes a shape from tensor values|needs the values"),
        (lambda x: x.numpy(), "needs the values|numpy"),
        (lambda x: x.cpu().numpy(), "needs the values|numpy"),
        (lambda x: torch.equal(x, x + 1), "compares tensor values"),
    ],
    ids=["item", "bool", "tolist", "nonzero", "boolean_index", "numpy", "cpu", "equal"],
)
def test_python_that_depends_on_values_is_refused_with_its_line(
    tiny_llama, application, monkeypatch, expression, reason
):
    _, folder = tiny_llama()

    def forward(self, x, **_):
        expression(x)
        return x, None

    with pytest.raises(CompileError, match=reason) as caught:
        application_with(monkeypatch, application, folder, forward)
    line = expression.__code__.co_firstlineno
    assert f"{__file__}:{line} " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (folder / "compiled").exists()


def test_a_missing_parameter_is_refused(tiny_llama, application):
    _, folder = tiny_llama()
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no tensor for 1 .*layers\.1\.mlp\.up_proj\.weight"):
        application(folder, load=False)
    assert not (folder / "compiled").exists()
    assert not list(folder.glob(".compiled*"))


def test_an_unused_tensor_is_reported(tiny_llama, application, caplog):
    _, folder = tiny_llama()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.extra"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    application(folder, load=False)
    assert "1 tensors that no parameter takes" in caplog.text
    record = json.loads((folder / "compiled" / "operators.json").read_text())
    assert "layers.0.mlp.extra" in record["warnings"][0]


def test_a_tensor_of_another_shape_is_refused(tiny_llama, application):
    _, folder = tiny_llama()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(49)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"norm\.weight .*\[49\], expected \[48\]"):
        application(folder, load=False)


def test_the_cast_damages_buffers_and_says_so(tiny_llama, application, monkeypatch, caplog):
    _, folder = tiny_llama()
    original = modeling_llama.NeuronLlamaMLP.__init__

    def with_buffers(self, config):
        original(self, config)
        self.register_buffer("inv_freq", torch.tensor([0.1, 1.0]), persistent=False)
        self.register_buffer("exact", torch.tensor([0.5, 1.0]), persistent=False)

    monkeypatch.setattr(modeling_llama.NeuronLlamaMLP, "__init__", with_buffers)
    app = application(folder, torch_dtype="bfloat16")
    assert "Buffer layers.0.mlp.inv_freq is rounded from torch.float32" in caplog.text
    assert "exact" not in caplog.text
    buffer = app.traced_model[0].modules[0].layers[0].mlp.inv_freq
    assert buffer[0].float().item() != pytest.approx(0.1, rel=1e-4)


class Interrupted(BaseException):
    pass


def test_an_interrupted_compile_leaves_nothing(tiny_llama, application, monkeypatch):
    _, folder = tiny_llama()

    def interrupt(*_):
        raise Interrupted

    monkeypatch.setattr(NeuronLlamaForCausalLM, "_local_weights", interrupt)
    with pytest.raises(Interrupted):
        application(folder, load=False)
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


def test_a_new_compile_keeps_files_of_others(tiny_llama, application):
    _, folder = tiny_llama()
    application(folder, load=False, tp_degree=2)
    (folder / "compiled" / "tokenizer.json").write_text("{}")
    application(folder, load=False, tp_degree=1)
    compiled = folder / "compiled"
    assert (compiled / "tokenizer.json").read_text() == "{}"
    assert [p.name for p in (compiled / "weights").iterdir()] == [
        "tp0_sharded_checkpoint.safetensors"
    ]
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def test_load_refuses_what_compile_did_not_finish(tiny_llama, application):
    _, folder = tiny_llama()
    app = application(folder, load=False)
    with pytest.raises(StandInError, match="holds no compiled model"):
        app.load(folder)
    (folder / "compiled" / "model.pt").write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(StandInError, match="was not compiled by this version"):
        app.load(folder / "compiled")


def test_load_refuses_another_degree(tiny_llama, application):
    _, folder = tiny_llama()
    application(folder, load=False, tp_degree=2)
    shutil.move(folder / "compiled", folder / "two")
    app = application(folder, load=False)
    with pytest.raises(StandInError, match="compiled with tp_degree 2, expected 1"):
        app.load(folder / "two")


@pytest.mark.parametrize("pickle", [False, True], ids=["safetensors", "pickle"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_checkpoint_formats(tiny_llama, application, pickle, sharded):
    model, folder = tiny_llama()
    (folder / "model.safetensors").unlink()
    model.save_pretrained(
        folder, safe_serialization=not pickle, max_shard_size="40KB" if sharded else "5GB"
    )
    suffix = "bin" if pickle else "safetensors"
    assert len(list(folder.glob(f"*.{suffix}"))) > 1 if sharded else True
    app = application(folder)
    prompt = [5, 6, 7, 8]
    greedy.assert_equal(app, model, [prompt], 5)


def test_a_broken_checkpoint_is_one_sentence(tiny_llama, application):
    _, folder = tiny_llama()
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="is no readable checkpoint") as caught:
        application(folder, load=False)
    assert "\n" not in str(caught.value)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds no checkpoint, expected one of"):
        application(folder, load=False)


def test_a_missing_shard_is_named(tiny_llama, application):
    model, folder = tiny_llama()
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        application(folder, load=False)


@pytest.mark.parametrize(
    ("option", "value"),
    [("qkv_kernel_enabled", True), ("mlp_kernel_enabled", True), ("ep_degree", 2)],
)
def test_features_that_would_not_happen_are_refused(tiny_llama, application, option, value):
    _, folder = tiny_llama()
    with pytest.raises(NotImplementedError, match=f"NeuronConfig.{option} is"):
        application(folder, load=False, **{option: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_logits": True}, "output_logits makes a list in NxDI 0.1"),
        ({"async_mode": True, "async": True}, "async_mode needs on_device_sampling_config"),
        ({"start_rank_id": 1}, "start_rank_id is 1, expected 0"),
        ({"local_ranks_size": 1, "tp_degree": 2}, "local_ranks_size is 1, expected 2"),
        ({"is_continuous_batching": True, "padding_side": "left"}, "caches of idle lines"),
        ({"batch_size": 2, "max_batch_size": 4}, "tkg_batch_size is 2, expected max_batch_size"),
    ],
)
def test_batches_that_the_caches_cannot_serve_are_refused(
    tiny_llama, application, options, message
):
    _, folder = tiny_llama()
    with pytest.raises((NotImplementedError, ValueError), match=message):
        application(folder, load=False, **options)


def test_a_work_folder_that_cannot_be_written_is_named(tiny_llama, application, monkeypatch):
    _, folder = tiny_llama()
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(folder / "config.json"))
    with pytest.raises(StandInError, match="cannot be written.*BASE_COMPILE_WORK_DIR"):
        application(folder, load=False)


def test_a_compiled_folder_is_a_model_from_0_3_on(tiny_llama, application, monkeypatch):
    """Its weights are read where the configuration came from, as the library's demo relies on."""
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    model, folder = tiny_llama()
    application(folder, load=False)
    app = NeuronLlamaForCausalLM(str(folder / "compiled"))
    app.load(folder / "compiled")
    prompt = [5, 6, 7]
    greedy.assert_equal(app, model, [prompt], 4)


def test_automatic_buckets(tiny_llama, application):
    _, folder = tiny_llama()
    app = application(
        folder, load=False, seq_len=300, max_context_length=256, enable_bucketing=True
    )
    assert app.context_encoding_model.neuron_config.buckets == [128, 256]
    assert app.token_generation_model.neuron_config.buckets == [128, 300]
    graphs = sorted(p.parent.parent.name for p in (folder / "compiled").rglob("graph.hlo"))
    assert graphs == ["_tp0_bk0", "_tp0_bk0", "_tp0_bk1", "_tp0_bk1"]


@pytest.mark.parametrize("archive", [True, False])
def test_a_pickle_that_runs_code_is_refused_without_advice_to_allow_it(archive, tmp_path):
    class Code:
        def __reduce__(self):
            return (print, ("ran",))

    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": Code()}, path, _use_new_zipfile_serialization=archive)
    with pytest.raises(CheckpointError, match="holds Python objects that are no tensors") as caught:
        load_state_dict(tmp_path)
    assert "weights_only" not in str(caught.value)
