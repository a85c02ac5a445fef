"""The device in the tests' own process."""

import pytest

from neuron_cpu import torch_device  # noqa: F401 - names the device
from neuron_cpu.torch_device.state import STATE


@pytest.fixture(autouse=True)
def device_of_one_test(monkeypatch):
    """One core."""
    for name in ("LOCAL_WORLD_SIZE", "NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES"):
        monkeypatch.delenv(name, raising=False)
    yield
    STATE.observer = None
