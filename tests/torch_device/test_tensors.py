"""Tensors of the device, against the same program on the CPU."""

import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from neuron_cpu import announce
from neuron_cpu.torch_device.state import STATE
from neuron_cpu.torch_device.tensor import NeuronTensor
from tests.crossed import full

F = nn.functional


def small(seed=0, hidden=32):
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(hidden, 4, 2 * hidden, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(50, hidden), layer, nn.Linear(hidden, 50))


def ids(*shape):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: (2 * x - x / 3 + 1) ** 2,
    "a part": lambda x: x[1:, ::2].t(),
    "positions": lambda x: x[torch.arange(2, device=x.device), torch.zeros_like(x[:2, 0]).long()],
    "positions of the host": lambda x: x[torch.arange(2), torch.tensor([1, 0])],
    "a mask": lambda x: x[x > 0],
    "written through a view": lambda x: x.clone().view(-1)[3:7].mul_(2)._base,
    "written in place": lambda x: x.clone().index_add_(
        0, torch.tensor([0], device=x.device), x[:1]
    ),
    "its sizes changed": lambda x: x.clone().t_().unsqueeze_(0),
    "out, grown": lambda x: torch.mm(x, x.t(), out=torch.empty(0, device=x.device)),
    "foreach": lambda x: torch._foreach_add([x, x * 2], 1.0),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, is_causal=True),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2)) * 1j),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_operator_computes_what_it_does_on_the_cpu(name):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
    expected, got = PROGRAMS[name](x), PROGRAMS[name](x.to("neuron"))
    flat, ours = torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(got)
    assert len(flat) == len(ours)
    for theirs, one in zip(flat, ours):
        assert isinstance(one, NeuronTensor) and one.device == torch.device("neuron", 0)
        assert one.shape == theirs.shape and one.stride() == theirs.stride()
        assert one.dtype == theirs.dtype
        torch.testing.assert_close(one.cpu(), theirs)


@pytest.mark.parametrize("optimiser", [torch.optim.AdamW, full(torch.optim.SGD)])
@pytest.mark.parametrize("kept", [False, True])
def test_training_follows_the_cpu(optimiser, kept):
    losses = []
    for device in ("cpu", "neuron"):
        model = small()
        steps = optimiser(model.parameters(), lr=1e-2)  # made before the move, as people do
        model.to(device)
        tokens = ids(2, 7).to(device)
        run = (lambda x, m=model: checkpoint(m, x, use_reentrant=False)) if kept else model
        got = []
        for _ in range(4):
            steps.zero_grad()
            loss = F.cross_entropy(run(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            steps.step()
            got.append(loss.item())
        losses.append(got)
        assert all(p.grad.device.type == device for p in model.parameters())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[0][0] > losses[0][-1]


def test_data_that_is_assigned_moves_a_parameter_in_place():
    model = small()
    held, tokens = model[0].weight, ids(1, 5)
    expected = model(tokens)
    expected.sum().backward()
    gradient = held.grad.clone()
    for device in ("neuron", "cpu"):
        for one in model.parameters():
            one.data = one.data.to(device)
            if one.grad is not None:
                one.grad.data = one.grad.data.to(device)
        assert model[0].weight is held and held.device.type == device and held.is_leaf
        assert isinstance(held, nn.Parameter) and torch.equal(held.grad.cpu(), gradient)
        torch.testing.assert_close(model(tokens.to(device)).cpu(), expected)
    held.to("neuron").data = torch.ones(2, device="neuron")  # of one device: other sizes, too
    plain = torch.zeros(2)
    plain.data = torch.ones(3, device="neuron")
    assert type(plain) is NeuronTensor and plain.tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers_follow_the_cpu(kind, bias):
    found = []
    for device in ("cpu", "neuron"):
        torch.manual_seed(0)
        layer = kind(3, 5, num_layers=2, bias=bias, bidirectional=True, batch_first=True)
        layer.to(device)
        x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(2)).to(device)
        x.requires_grad_()
        out, state = layer(x)
        out.square().sum().backward()
        with torch.inference_mode():
            torch.testing.assert_close(layer(x)[0], out)
        flat = torch.utils._pytree.tree_leaves(state)
        found.append([out, *flat, x.grad, *(one.grad for one in layer.parameters())])
    for theirs, ours in zip(*found):
        assert ours.is_neuron
        torch.testing.assert_close(ours.cpu(), theirs)


def test_a_state_is_saved_with_its_device_and_loaded_where_asked():
    model = small().to("neuron")
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "cpu": torch.ones(2)}, file)
    for where, device in ((None, "neuron"), ("cpu", "cpu"), ("neuron:0", "neuron")):
        file.seek(0)
        loaded = torch.load(file, map_location=where, weights_only=True)
        assert loaded["cpu"].device.type == ("cpu" if where is None else device)
        assert {one.device.type for one in loaded["model"].values()} == {device}
        other = small(seed=1).to(device)
        other.load_state_dict(loaded["model"])
        tokens = ids(1, 5)
        expected = model(tokens.to("neuron")).cpu()
        torch.testing.assert_close(other(tokens.to(device)).cpu(), expected)


def test_views_share_their_storage_also_in_a_file():
    whole = torch.arange(6.0, device="neuron")
    part = whole[2:5]
    file = io.BytesIO()
    torch.save((whole, part), file)
    file.seek(0)
    whole, part = torch.load(file)
    part.fill_(9)
    assert whole.tolist() == [0, 1, 9, 9, 9, 5] and part.data_ptr() == whole.data_ptr() + 8


def test_autocast_chooses_types_as_elsewhere():
    model = nn.Linear(8, 8)
    for device in ("cpu", "neuron"):
        model.to(device)
        x = torch.ones(2, 8, device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            made = (model(x), x @ x.t(), F.layer_norm(x, (8,)), torch.cat([model(x), x]))
        found = [one.dtype for one in made]
        assert found == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
        made[0].float().sum().backward()
        assert model.weight.grad.dtype is torch.float32
        assert model(x).dtype is torch.float32


def test_64_bits_are_computed_in_32():
    small_step = torch.ones(2, dtype=torch.float64, device="neuron") + 1e-10
    assert small_step.dtype is torch.float64 and small_step.tolist() == [1.0, 1.0]
    large = torch.tensor([2**40 + 3, -5], device="neuron")
    assert large.tolist() == [2**40 + 3, -5] and (large + 1).tolist() == [4, -4]
    assert (large.add_(1)).tolist() == [4, -4]
    assert torch.ones(3, device="neuron").double().sum(dtype=torch.float32).dtype is torch.float32


def test_an_operator_left_to_the_cpu_is_told_once(caplog, monkeypatch):
    torch.neuron.synchronize()
    import torch_neuronx

    torch_neuronx.clear_op_tracking()
    x = torch.eye(3, device="neuron")
    with caplog.at_level(logging.WARNING, "torch_neuronx"):
        for _ in range(2):
            torch.linalg.qr(x @ x)
    assert len(caplog.records) == 1 and "aten::linalg_qr" in caplog.records[0].getMessage()
    assert torch_neuronx.get_fallback_ops() == ["aten::linalg_qr"]
    assert "aten::mm" in torch_neuronx.get_executed_ops()
    monkeypatch.setenv("NEURON_FALLBACK_ENABLED", "0")
    with pytest.raises(RuntimeError, match="linalg_qr has no kernel on neuron"):
        torch.linalg.qr(x)


REFUSED: dict[str, tuple[type, str, Callable[[torch.Tensor], Any]]] = {
    "devices": (RuntimeError, "aten::add .* on cpu, expected", lambda x: x + torch.ones(2, 2)),
    "devices in a list": (RuntimeError, "aten::cat", lambda x: torch.cat([x, torch.ones(2, 2)])),
    "index": (ValueError, "neuron:7 is no device", lambda x: torch.ones(2, device="neuron:7")),
    "set_device": (ValueError, "from 0 to 0", lambda x: torch.neuron.set_device(3)),
    "properties": (ValueError, "from 0", lambda x: torch.neuron.get_device_properties(2)),
    "format": (
        RuntimeError,
        "contiguous_format or preserve_format",
        lambda x: x.reshape(1, 1, 2, 2).to(memory_format=torch.channels_last),
    ),
    "numpy": (TypeError, "call .cpu", lambda x: x.numpy()),
    "host storage": (
        RuntimeError,
        "storage on cpu",
        lambda x: x.set_(torch.ones(2).untyped_storage()),
    ),
    "shapes": (RuntimeError, "mat1 and mat2", lambda x: x @ torch.ones(3, 2, device="neuron")),
    "operators": (NotImplementedError, "no kernel on neuron here", torch._cslt_compress),
    "generator": (RuntimeError, "on cpu, because", lambda x: torch.Generator(device="neuron")),
    "generator of a core": (RuntimeError, "on cpu", lambda x: torch.Generator("neuron:0")),
    "events": (
        RuntimeError,
        "enable_timing",
        lambda x: torch.neuron.Event().elapsed_time(torch.neuron.Event()),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_so_in_a_sentence(name):
    kind, said, act = REFUSED[name]
    with pytest.raises(kind, match=said) as caught:
        act(torch.ones(2, 2, device="neuron"))
    if name != "shapes":  # PyTorch's own
        assert str(caught.value).count("\n") == 0


def test_the_module_and_the_accelerator():
    assert torch.accelerator.current_accelerator().type == "neuron"
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1
    assert torch.neuron.is_available() and torch.neuron.current_device() == 0
    x = torch.ones(3).to(torch.neuron.current_device())
    assert x.is_neuron and nn.Linear(2, 2).to(0).weight.is_neuron and x.neuron().is_neuron
    start, end = torch.neuron.Event(enable_timing=True), torch.neuron.Event(enable_timing=True)
    with torch.neuron.stream(torch.neuron.Stream()) as stream:
        start.record()
        stream.wait_event(start)
        end.record()
    torch.neuron.synchronize()
    torch.accelerator.synchronize()
    torch.accelerator.set_device_index(0)
    assert torch.accelerator.memory_allocated() == torch.neuron.memory_allocated()
    assert start.elapsed_time(end) >= 0 and torch.neuron.current_stream().query()
    assert torch.neuron.get_device_name() == "neuron:0"
    with torch.device("neuron"), torch.neuron.device(0):
        assert torch.zeros(2).is_neuron


def test_cores_that_the_runtime_names_are_devices_of_their_own(monkeypatch):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    assert torch.accelerator.device_count() == 2
    x = torch.ones(3, device="neuron:1", requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad.device == torch.device("neuron", 1) and x.to("neuron:0").device.index == 0
    with pytest.raises(RuntimeError, match="on neuron:1, expected all of its tensors on neuron:0"):
        torch.ones(3, device="neuron:0") + x
    with torch.neuron.device(1):
        assert torch.zeros(2, device="neuron").device.index == 1


def test_memory_is_that_of_the_living_tensors():
    before = torch.neuron.memory_allocated()
    torch.neuron.reset_peak_memory_stats()
    x = torch.zeros(1000, device="neuron")
    part = x[:10]
    assert torch.neuron.memory_allocated() == before + 4000
    del x
    assert torch.neuron.memory_allocated() == before + 4000 and part.shape == (10,)
    del part
    assert torch.neuron.memory_allocated() == before
    assert torch.neuron.max_memory_allocated() >= before + 4000
    assert torch.neuron.memory_stats()["allocated_bytes.all.current"] == before


def test_random_numbers_are_the_hosts():
    torch.manual_seed(5)
    first = torch.randn(4, device="neuron")
    torch.manual_seed(5)
    assert torch.equal(torch.randn(4), first.cpu())
    assert isinstance(torch.Generator(), torch.Generator) and torch.default_generator.seed()
    drawn = [
        torch.rand(2, device=d, generator=torch.Generator().manual_seed(4)).cpu()
        for d in ("cpu", "neuron")
    ]
    assert torch.equal(*drawn) and isinstance(torch.default_generator, torch.Generator)
    state = torch.neuron.get_rng_state()
    one = F.dropout(first, 0.5)
    torch.neuron.set_rng_state(state)
    assert torch.equal(one, F.dropout(first, 0.5))


def test_a_fork_after_the_device_was_used_is_refused():
    x = torch.ones(2, device="neuron")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            x + 1
        except RuntimeError as error:
            said = str(error)
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.waitpid(child, 0)
    assert "'spawn'" in os.read(reading, 1000).decode() and not STATE.forked


@pytest.mark.full  # 4 s
def test_importing_torch_under_the_stand_in_names_the_device_and_loads_nothing():
    script = """
import neuron_cpu
neuron_cpu.install()
import sys, torch
assert str(torch.device("neuron")) == "neuron"
assert torch.accelerator.current_accelerator().type == "neuron"
torch.manual_seed(1)
assert torch.neuron.is_available()
loaded = [name for name in sys.modules if "torch_device" in name]
assert not loaded, loaded
module = torch.nn.Linear(2, 2)
weight = module.weight
assert module.to("neuron").weight is weight and weight.is_neuron
print(torch.tensor([1.5], device="neuron") * 2)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "tensor([3.], device='neuron:0')\n", done.stderr


def test_an_older_pytorch_is_named_where_the_device_is_asked_for(monkeypatch):
    monkeypatch.setattr(announce, "LEAST", (99, 1))
    with pytest.raises(ImportError, match=r"PyTorch 99.1 or later, got 2\."):
        announce.room("module")


def test_attributes_of_parameters_outlive_a_change_of_type():
    """NxD tags parameters, and casts its modules after that; PyTorch's own way keeps the tags."""
    assert not torch.__future__.get_swap_module_params_on_conversion()
    module = torch.nn.Linear(2, 3)
    module.weight.tag = 1
    held = module.weight
    assert module.to(torch.bfloat16).weight.tag == 1 and module.weight is held
    assert module.to("neuron").weight is held and held.device.type == "neuron"
    assert not torch.__future__.get_swap_module_params_on_conversion()
