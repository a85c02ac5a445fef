"""`python -m neuron_cpu` takes kernels of the current language like those of the old one."""

import json
import os

import pytest
import torch

from neuron_cpu.__main__ import main
from neuron_cpu.commands.kernels import load_kernel
from neuron_cpu.core import NkiWarning
from neuron_cpu.core.time.schedule import schedule
from neuron_cpu.page import data
from tests.warned import allows

KERNEL = """
import nki
import nki.language as nl

@nki.jit
def k(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.multiply(nl.load(x), 2.0))
    return out

def plain(x):
    return k(x)

def reference(x):
    return x * 2
"""
ARGS = ["--arg", "128x64:bf16"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(KERNEL)
    return str(path)


@pytest.mark.parametrize("name", ["k", "plain"])
def test_profile_names_the_generation(file, name, target, capsys):
    target("trn3")
    assert main(["profile", f"{file}:{name}", *ARGS]) == 0
    assert "on gen4, uncalibrated" in capsys.readouterr().out
    assert main(["profile", f"{file}:{name}", *ARGS, "--target", "trn2"]) == 0
    assert "µs on a device" in capsys.readouterr().out
    assert os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] == "trn3"
    target("inf2")
    assert main(["profile", f"{file}:{name}", *ARGS, "--grid", "1"]) == 0
    shown = capsys.readouterr().out
    assert "µs on a device" in shown and "uncalibrated" not in shown


WIDE = """
import nki, nki.isa as nisa, nki.language as nl
import neuronxcc.nki as before, neuronxcc.nki.language as bl

@nki.jit
def k(x):
    out = nl.ndarray((128, 1024), dtype=nl.float32, buffer=nl.shared_hbm)
    x_sb = nl.load(x)
    sums_psum = nl.ndarray((128, 1024), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums_psum, stationary=x_sb[:, 0:128], moving=x_sb)
    nl.store(out, nl.copy(sums_psum))
    return out

@before.jit
def old(x):
    out = bl.ndarray(x.shape, x.dtype, buffer=bl.shared_hbm)
    bl.store(out, bl.load(x))
    return out

def reference(x):
    return x[:, :128].T @ x

def same(x):
    return x
"""


@pytest.mark.parametrize(
    ("name", "reference", "said", "refusing"),
    [
        ("k", "reference", "Built for trn3, the default; trn1 and trn2 refuse it: k", "trn1 trn2"),
        ("old", "same", "Built for trn1, the default; trn2 takes it, too.", ""),
    ],
)
@pytest.mark.parametrize("command", ["check", "profile", "sweep"])
def test_a_default_is_told_with_what_other_chips_take(
    command, name, reference, said, refusing, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    file, figures = tmp_path / "wide.py", tmp_path / "figures.json"
    file.write_text(WIDE)
    asked = [command, f"{file}:{name}", "--json", str(figures), "--arg"]
    asked += ["128xN:bf16" if command == "sweep" else "128x1024:bf16"]
    more = {"check": f"--ref={file}:{reference}", "sweep": "--range=N=1024"}
    asked += [more[command]] if command in more else []
    assert main(asked) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    chips = json.loads(figures.read_text())["chips"]
    assert " ".join(chip for chip, why in chips.items() if why) == refusing
    assert main([*asked, "--target", "trn3" if name == "k" else "trn1"]) == 0
    assert "the default" not in capsys.readouterr().out


def test_profile_times_what_check_refuses(tmp_path, capsys):
    """A tile that nobody wrote is stored: the time is known, the values are not."""
    file = tmp_path / "part.py"
    file.write_text(KERNEL.replace("nl.multiply(nl.load(x), 2.0)", "nl.ndarray(x.shape, x.dtype)"))
    with pytest.warns(NkiWarning, match="sim_undefined_data"):
        assert main(["profile", f"{file}:k", *ARGS]) == 0
    assert "µs on" in capsys.readouterr().out
    assert main(["check", f"{file}:k", *ARGS, "--ref", f"{file}:reference"]) != 0
    assert "sim_undefined_data" in "".join(capsys.readouterr())


def test_pages_show_the_limits_of_their_chip(file, target):
    target("trn2")
    kernel = load_kernel(f"{file}:k")
    made = schedule(kernel.trace(torch.empty(128, 64, dtype=torch.bfloat16, device="meta")))
    assert max(end for *_, end in made.lane_spans()) == pytest.approx(made.total)
    assert data.run("k", made)["memory"][0]["capacity"] == 208.0  # 212,984 bytes


def test_unknown_targets_and_grids_are_told(file, target, capsys):
    target("trn9")
    assert main(["profile", f"{file}:k", *ARGS]) == 2
    assert "expected one of trn1" in capsys.readouterr().err
    target("trn1")
    assert main(["profile", f"{file}:k", *ARGS, "--grid", "3"]) == 2
    assert "1 or 2" in capsys.readouterr().err


STRANGERS = """
from dataclasses import dataclass
from enum import Enum

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


class Kind(Enum):
    rms = 0
    none = 1


@dataclass
class Config(nl.NKIObject):
    kind: Kind = Kind.rms
    rows: int = 128

CONFIG = Config(rows=64)
COUNT = np.array([[3]], np.int32)

@nki.jit
def normed(x, gain, config=None):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for start in range(0, x.shape[0], config.rows):
        n = min(config.rows, x.shape[0] - start)
        tile = nl.load(x[start : start + n, :], nl.float32)
        weight = nl.ndarray(tile.shape, nl.float32)
        nisa.dma_copy(weight, gain.broadcast(0, n))
        if config.kind == Kind.rms:
            tile = nl.rms_norm(tile, weight, axis=-1, n=x.shape[1], epsilon=1e-5)
        nl.store(out[start : start + n, :], tile)
    return out

def normed_reference(x, gain, config):
    assert config.rows == 64
    return x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * gain

@nki.jit
def added(x, count):
    out, tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm), nl.load(x)
    register = nisa.register_alloc()
    nisa.register_load(register, nl.load(count))
    for _ in nl.dynamic_range(register):
        nisa.tensor_scalar(tile, tile, nl.add, 1.0)
    nl.store(out, tile)
    return out

def added_reference(x, count):
    return x + count[0, 0]

@nki.jit
def written(cache, new, at):
    nisa.dma_copy(dst=cache.select(0, nl.load(at)), src=new.select(0, 0))
    return cache

def written_reference(cache, new, at):
    cache = np.array(cache)
    cache[int(at[0, 0])] = new[0]
    return cache

if __name__ == "__main__":
    x = np.ones((2, 3), np.float32)
    print("sum", added(x, COUNT).sum(), nki.simulate(written)(x, 5 * x[:1], COUNT - 2)[1])
"""


@pytest.fixture
def stranger(tmp_path):
    path = tmp_path / "strangers.py"
    path.write_text(STRANGERS)
    return lambda command, name, *words: main([command, f"{path}:{name}", *words])


def arguments(*texts):
    return [word for text in texts for word in ("--arg", text)]


NORMED = arguments("150x96:bf16", "1x96:fp32", "config=@CONFIG")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("normed", NORMED),
        ("added", arguments("8x4:fp32", "1x1:i32:0..5")),
        ("written", arguments("8x4:fp32", "1x4:fp32", "1x1:i32:0..7")),
    ],
)
@allows("sim_expansion")
def test_a_strangers_kernel_is_judged(tmp_path, stranger, name, words, capsys):
    """Also one whose loop is as long as data say: it is traced with the values that it runs on."""
    reference = f"{tmp_path / 'strangers.py'}:{name}_reference"
    assert stranger("check", name, *words, "--ref", reference) == 0
    assert "correct" in capsys.readouterr().out
    assert stranger("compare", name, *words) == 0
    assert "agree" in capsys.readouterr().out
    assert stranger("profile", name, *words) == 0  # limits of values change no time
