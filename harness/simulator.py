"""The harness's only import of the simulated NeuronCore, `neuron_cpu.core`.

Importing it takes PyTorch's time, so it is imported beside the submission, not by the driver.
"""

import neuron_cpu.core.current  # noqa: F401 - functions of both languages have rows of provenance
from neuron_cpu.core import NkiError, Program, observe_kernel_calls
from neuron_cpu.core.check import provenance
from neuron_cpu.core.device import spec
from neuron_cpu.core.device.spec import Engine, NeuronCore
from neuron_cpu.core.report import bands, report, tables
from neuron_cpu.core.time import cost
from neuron_cpu.core.time.schedule import COMPILER_ORDER, Schedule, schedule, schedules

__all__ = [
    "COMPILER_ORDER", "Engine", "NeuronCore", "NkiError", "Program", "Schedule",
    "bands", "cost", "observe_kernel_calls", "provenance",
    "report", "schedule", "schedules", "spec", "tables",
]  # fmt: skip
