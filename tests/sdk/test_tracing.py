"""torch_neuronx.trace, and what takes its result: files, replicas, weights, places on cores."""

import io
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import pytest
import torch
import torch_neuronx
from torch import nn
from torch_neuronx import scripting

from neuron_cpu import files
from neuron_cpu.errors import StandInError

scripting.install()  # as NxD's model builder does
REPOSITORY = Path(__file__).resolve().parents[2]
LOADS = """
import neuron_cpu; neuron_cpu.ensure_sdk()
import torch, torch_neuronx
torch.save(torch.jit.load("model.pt")(torch.load("in.pt")), "out.pt")
"""


@nki.jit
def doubled(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x) + nl.load(x))
    return out


class Model(nn.Module):
    """A convolution, a constant, an output that is a dict with a tuple, and a kernel if asked."""

    def __init__(self, kernel=False):
        super().__init__()
        self.conv, self.kernel = nn.Conv2d(3, 4, 3), kernel
        self.register_buffer("shift", torch.full((4, 1, 1), 0.5))

    def forward(self, x):
        y = self.conv(x) + self.shift
        rows = y.flatten(0, 2)
        return {"map": y, "more": (y.mean((2, 3)), doubled(rows) if self.kernel else rows)}


def assert_same(got, expected):
    torch.testing.assert_close(got["map"], expected["map"])
    for one, other in zip(got["more"], expected["more"], strict=True):
        torch.testing.assert_close(one, other)


@pytest.fixture
def image():
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def traced(image):
    torch.manual_seed(0)
    model = Model().eval()
    return model, torch_neuronx.trace(model, torch.zeros_like(image))


def test_a_traced_module_is_saved_and_loaded(traced, image, tmp_path, monkeypatch):
    """By name, as a file, and in a process that knows nothing of the model's class."""
    monkeypatch.chdir(tmp_path)
    model, neuron = traced
    expected = model(image)
    torch.jit.save(neuron, "model.pt")
    neuron.save("again.pt")
    buffer = io.BytesIO()
    torch.jit.save(neuron, buffer)
    buffer.seek(0)
    for source in ("model.pt", Path("again.pt"), buffer):
        assert_same(torch.jit.load(source)(image), expected)
    twice = torch.jit.load("model.pt")
    torch.jit.save(twice, "twice.pt")
    assert_same(torch.jit.load("twice.pt")(image), expected)
    torch.save(image, "in.pt")
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", LOADS], env=environment, check=True)
    assert_same(torch.load("out.pt"), expected)


def test_what_reads_values_is_no_graph(tmp_path):
    def forward(x):
        return x + 1 if x.sum() > 0 else x

    neuron = torch_neuronx.trace(forward, torch.ones(2, 3))
    with pytest.raises(StandInError, match="value"):
        torch.jit.save(neuron, tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()


def of_a_device():
    """TorchScript that names a class of the device's runtime."""
    whole, changed = io.BytesIO(), io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(2, 3)), whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(changed, "w") as new:
        for entry in old.namelist():
            text = old.read(entry)
            if entry.endswith(".py"):
                text = text.replace(
                    b"bias : Tensor", b"bias : __torch__.torch.classes.neuron.Model"
                )
            new.writestr(entry, text)
    return changed.getvalue()


def cut(content, kept):
    return content[: int(kept * len(content)) if kept < 1 else int(kept)]


@pytest.mark.parametrize("kept", [0, 20, 0.5])
@pytest.mark.parametrize("kind", ["traced", "TorchScript", "NxD's"])
def test_a_file_that_is_cut_short_is_told(traced, tmp_path, kind, kept):
    path = tmp_path / "model.pt"
    if kind == "NxD's":
        path.write_bytes(files.sealed(scripting._MAGIC, pickle.dumps([*range(1000)])))
    else:
        torch.jit.save(traced[1] if kind == "traced" else torch.jit.script(traced[0].conv), path)
    path.write_bytes(cut(path.read_bytes(), kept))
    with pytest.raises(StandInError, match=r"model.pt cannot be read \(.* save it again"):
        torch.jit.load(path)


def test_a_file_with_a_flipped_bit_is_told(traced, tmp_path):
    path = tmp_path / "model.pt"
    torch.jit.save(traced[1], path)
    content = path.read_bytes()
    for place in range(len(content) // 7, len(content), len(content) // 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(StandInError, match="damaged or cut short.*save it again"):
            torch.jit.load(path)


def test_files_from_elsewhere_are_told(tmp_path):
    path = tmp_path / "model.pt"
    unknown = files.sealed(scripting._MAGIC, b"cneuronx_of_another_release\nModel\n.")
    for content in (of_a_device(), unknown, b"NEFF" * 50):
        path.write_bytes(content)
        with pytest.raises(StandInError, match=r"cannot be read \(.*\), expected a whole file of"):
            torch.jit.load(path)


def test_replicas_take_any_batch(traced, image):
    """The documentation's examples: default, named cores, several batches."""
    model, neuron = traced
    images = torch.randn(5, 3, 8, 8)
    for cores in (None, [0, 1], ["nc:0", "nc:1"]):
        got = torch_neuronx.DataParallel(neuron, device_ids=cores)(images)
        torch.testing.assert_close(got["map"], model(images)["map"])
    torch.testing.assert_close(
        torch_neuronx.dynamic_batch(neuron)(images)["map"], model(images)["map"]
    )


def test_replicas_without_dynamic_batching(image):
    """Along dimension 2 each core's part is convolved by itself."""
    model = nn.Conv2d(3, 3, 3).eval()
    neuron = torch_neuronx.trace(model, image)
    along = torch_neuronx.DataParallel(neuron, device_ids=[0, 1], dim=2)
    images = torch.randn(1, 3, 16, 8)
    expected = torch.cat([model(part) for part in images.chunk(2, 2)], 2)
    torch.testing.assert_close(along(images), expected)
    with pytest.raises(ValueError, match="got 8 along dimension 2, expected 8 for each of 2 cores"):
        along(image)
    fixed = torch_neuronx.DataParallel(neuron, device_ids=[0, 1])
    fixed.disable_dynamic_batching()
    with pytest.raises(ValueError, match="got 4 along dimension 0"):
        fixed(torch.randn(4, 3, 8, 8))
    assert fixed(torch.randn(2, 3, 8, 8)).shape == (2, 3, 6, 6)


def test_separate_weights_are_replaced(tmp_path):
    first, second, x = nn.Linear(3, 2), nn.Linear(3, 2), torch.randn(4, 3)
    neuron = torch_neuronx.trace(first, x, inline_weights_to_neff=False)
    torch_neuronx.move_trace_to_device(neuron, 0)
    torch.jit.save(neuron, tmp_path / "model.pt")
    loaded = torch.jit.load(tmp_path / "model.pt")
    for module, weights in ((loaded, second), (neuron, second.state_dict())):
        torch_neuronx.replace_weights(module, weights)
        torch.testing.assert_close(module(x), second(x))
    with pytest.raises(ValueError, match="no weight of shape"):
        torch_neuronx.replace_weights(loaded, {"weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="part of its graph"):
        torch_neuronx.replace_weights(torch_neuronx.trace(first, x), second)


def test_places_and_loads_are_checked(traced, monkeypatch):
    _, neuron = traced
    torch_neuronx.lazy_load(neuron)
    torch_neuronx.async_load(neuron, True)
    torch_neuronx.set_multicore(neuron)
    with torch_neuronx.multicore_context(), torch_neuronx.neuron_cores_context(1, 1):
        pass
    with pytest.raises(ValueError, match="Cores 2 to 2 are asked for, expected some of 2"):
        torch_neuronx.set_neuron_cores(neuron, 2)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-3,8")
    torch_neuronx.set_neuron_cores(neuron, 4)
    with pytest.raises(ValueError, match=r"device_ids \[5\], expected some of 0 to 4"):
        torch_neuronx.DataParallel(neuron, device_ids=[5])
    for call in (torch_neuronx.lazy_load, torch_neuronx.DataParallel, torch_neuronx.async_load):
        with pytest.raises(TypeError, match="got a Linear, expected what torch_neuronx.trace"):
            call(nn.Linear(1, 1))
