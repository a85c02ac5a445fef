"""Kernels of the current language run for gen2 unless a test says otherwise."""

import pytest

# What production kernels do though the documentation leaves it open (test_open_points.py).
USED_THOUGH_OPEN = ("dynamic_slice", "expansion", "topk_place")


@pytest.fixture
def production(monkeypatch):
    """Only what nobody runs warns."""
    monkeypatch.setenv("NKI_CPU_SILENCE", ",".join(f"sim_{name}" for name in USED_THOUGH_OPEN))


@pytest.fixture(autouse=True)
def target(monkeypatch):
    """A function that chooses the generation."""

    def choose(name):
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", name)

    choose("trn1")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")  # device loops may run on one core
    return choose
