"""The calibration: its kernels compute what they claim, its table says what it predicts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def load(name):
    """A module of benchmarks/, which is no package."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


kernels = load("calibration_kernels")
calibrate = load("calibrate")


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", ["matmul_tiled", "matmul_hoisted", "matmul_blocked_2x2"])
def test_matmuls(name):
    lhs, rhs = random(256, 256, dtype=torch.bfloat16), random(256, 1024, dtype=torch.bfloat16)
    expected = lhs.double().T @ rhs.double()
    torch.testing.assert_close(
        getattr(kernels, name)(lhs, rhs).double(), expected, rtol=2**-8, atol=2**-6
    )


def test_fully_blocked_matmul():
    lhs, rhs = random(2048, 2048, dtype=torch.bfloat16), random(2048, 1024, dtype=torch.bfloat16)
    expected = lhs.double().T @ rhs.double()
    error = (kernels.matmul_blocked_3d(lhs, rhs).double() - expected).abs().max()
    assert error < 0.01 * expected.abs().max()  # two bf16 roundings: sums of blocks stay in bf16


def selective_scan(delta, u, a, b, c):
    """The recurrence itself, in float64."""
    delta, u, a, b, c = (t.double() for t in (delta, u, a, b, c))
    out = torch.zeros_like(delta)
    state = torch.zeros(delta.shape[0], a.shape[1], dtype=torch.float64)
    for t in range(delta.shape[1]):
        decay = torch.exp(delta[:, t, None] * a)
        state = decay * state + (delta[:, t] * u[:, t])[:, None] * b[None, :, t]
        out[:, t] = (state * c[None, :, t]).sum(-1)
    return out


@pytest.mark.parametrize(
    ("name", "channels", "length"),
    [("mamba_states_outside", 256, 96), ("mamba_channels_outside", 128, 512),
     ("mamba_channels_outside", 128, 1024), ("mamba_tiled", 128, 1024)],
)  # fmt: skip
def test_selective_scans(name, channels, length):
    delta, u = random(channels, length, seed=1).abs(), random(channels, length, seed=2)
    a, b, c = -random(channels, 3, seed=3).abs(), random(3, length, seed=4), random(3, length)
    found = getattr(kernels, name)(delta, u, a, b, c)
    expected = selective_scan(delta, u, a, b, c)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["layernorm_language", "layernorm_statistics"])
def test_layernorms(name):
    x = 3 * random(300, 1000) + 1
    gamma, beta = random(1, 1000, seed=1), random(1, 1000, seed=2)
    expected = torch.nn.functional.layer_norm(x, (1000,), gamma[0], beta[0], 1e-5)
    torch.testing.assert_close(getattr(kernels, name)(x, gamma, beta), expected)


def point(name):
    return next(p for p in calibrate.POINTS if p.name == name)


def test_short_points_are_within_the_limit_and_stand_in_the_document():
    document = calibrate.DOCUMENT.read_text()
    for name in ("Mamba v1, 256 ch, 512 tokens", "Mamba v2, 4096 ch, 512 tokens"):
        one = point(name)
        profiles = list(calibrate.cost.PROFILES)
        found = calibrate.predict(one, profiles)
        assert abs(calibrate.ratio(one, found[profiles[0]]) - 1) <= calibrate.LIMIT
        row = calibrate.table([(one, found)], profiles).splitlines()[-1]
        assert row in document, "docs/cost_model.md is out of date: run make calibrate"


def test_every_point_stands_in_the_document():
    document = calibrate.DOCUMENT.read_text()
    for one in calibrate.POINTS:
        assert f"| {one.name} | {one.measured_us:.1f} |" in document


def test_kernel_that_spills_is_named_as_refused():
    one = point("Mamba v2, 4096 ch, 8192 tokens")
    assert calibrate.predict(one, ["row-rule"]) is None
    assert calibrate.cells(one, None, ["row-rule"]).startswith("refused")


def test_points_can_be_chosen_and_a_miss_fails_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["calibrate.py", "--points", "256 ch"])
    assert calibrate.main() == 0
    assert capsys.readouterr().out.count("Mamba v1") == 1
    monkeypatch.setattr(calibrate, "LIMIT", 0.001)
    assert calibrate.main() == 1
    assert "off by more than" in capsys.readouterr().out
