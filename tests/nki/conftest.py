"""Kernels of the current language run for gen2 unless a test says otherwise."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def target(monkeypatch):
    """A function that chooses the generation."""

    def choose(name):
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", name)

    choose("trn1")
    return choose
