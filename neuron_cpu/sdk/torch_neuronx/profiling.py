"""Profiling of TorchNeuron: settings that are taken, and PyTorch's own trace of this machine.

Source of the names: AWS Neuron documentation, guide to profiling TorchNeuron (June 2026). Times are
this machine's, none is a device's.
"""

import enum
from pathlib import Path
from typing import Any

import torch


class ProfileMode(enum.Enum):
    """What a device would record."""

    DEVICE = "device"
    RUNTIME = "runtime"
    CPU_UTIL = "cpu_util"
    HOST_MEMORY = "host_memory"


class NeuronConfig(torch._C._profiler._ExperimentalConfig):
    """`torch.profiler.profile(experimental_config=NeuronConfig(...))`."""

    def __init__(
        self, modes: Any = (), profile_output_dir: Any = "neuron_profile", **options: Any
    ) -> None:
        super().__init__()
        self.modes, self.profile_output_dir = list(modes), Path(profile_output_dir)
        self.options = options


class NeuronProfiler:
    """Writes a trace that chrome://tracing and ui.perfetto.dev read."""

    def __init__(self, config: NeuronConfig) -> None:
        self.config = config

    def export_trace(self, profiler: Any) -> None:
        """`on_trace_ready` of the profiler: a file in `profile_output_dir`."""
        self.config.profile_output_dir.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.config.profile_output_dir / "trace.json"))
