"""`python -m neuron_cpu` takes kernels of the current language like those of the old one."""

from __future__ import annotations

import pytest
import torch

from neuron_cpu.__main__ import main
from neuron_cpu.commands.kernels import load_kernel
from neuron_cpu.core.time.schedule import schedule
from neuron_cpu.page import data

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
    target("trn2")
    assert main(["profile", f"{file}:{name}", *ARGS]) == 0
    assert "on gen3, uncalibrated" in capsys.readouterr().out
    target("inf2")
    assert main(["profile", f"{file}:{name}", *ARGS, "--grid", "1"]) == 0
    shown = capsys.readouterr().out
    assert "µs on a device" in shown and "uncalibrated" not in shown


def test_pages_show_the_limits_of_their_chip(file, target):
    target("trn2")
    kernel = load_kernel(f"{file}:k")
    made = schedule(kernel.trace(torch.empty(128, 64, dtype=torch.bfloat16, device="meta")))
    assert max(end for *_, end in made.lane_spans()) == pytest.approx(made.total)
    assert data.run("k", made)["memory"][0]["capacity"] == pytest.approx(212984 / 1024)


def test_compare_and_check(file, capsys):
    assert main(["compare", f"{file}:k", *ARGS]) == 0
    assert main(["check", f"{file}:k", "--ref", f"{file}:reference", *ARGS]) == 0
    assert "correct" in capsys.readouterr().out


def test_unknown_targets_and_grids_are_told(file, target, capsys):
    target("trn9")
    assert main(["profile", f"{file}:k", *ARGS]) == 2
    assert "expected one of trn1" in capsys.readouterr().err
    target("trn1")
    assert main(["profile", f"{file}:k", *ARGS, "--grid", "3"]) == 2
    assert "1 or 2" in capsys.readouterr().err
