"""Which SDK runs here, and everything that depends on it: no other module asks."""

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import neuron_cpu
from neuron_cpu import libraries
from neuron_cpu.libraries import Libraries


class Source(str, Enum):
    """The source of a time or a rate, in the words that reports show."""

    SIMULATOR = "simulator"  # wall clock of the CPU simulator, no device time
    DEVICE = "device"  # wall clock on a NeuronCore
    COST_MODEL = "cost model"  # estimated by neuron_cpu
    PUBLISHED = "published"  # the contest's own figures
    GIVEN = "given"  # by the command line

    __str__ = str.__str__

    @property
    def label(self) -> str:
        """The meaning of a wall-clock time of this source."""
        return _LABELS.get(self, self.value)


_LABELS = {
    Source.SIMULATOR: "wall clock of the CPU simulator, not a device time",
    Source.DEVICE: "measured on the device",
}


@dataclass(frozen=True)
class Platform:
    """The driver's differences between a device and the stand-in.

    Attributes:
        name: of where the graphs come from.
        times: source of wall-clock times.
        baseline_figures: the kind of the baseline's own figures, in words.
        runs: how often a measurement is repeated by default.
        warm_ups: unmeasured runs after the accuracy check.
        new_tokens: of each prompt of a whole benchmark run, where none were asked for.
        default_ranks: tensor-parallel degree unasked, whatever the heads; None: where it divides.
        simulates: whether a simulator computes. Then graphs show their values, a cost model tells
            times, and the baseline may have a process of its own.
        confines: whether a submission's process may be kept from the file system.
    """

    name: str
    times: Source
    baseline_figures: str
    runs: int
    warm_ups: int
    new_tokens: int | None
    default_ranks: int | None
    simulates: bool
    confines: bool


# The simulator's times are not worth repeating, and the accuracy check has warmed its caches. Each
# token is simulated: 8 are enough to see a wrong kernel, and few enough for a laptop.
STAND_IN = Platform(
    name="stand-in",
    times=Source.SIMULATOR,
    baseline_figures="estimated by the cost model of neuron_cpu",
    runs=1,
    warm_ups=0,
    new_tokens=8,
    default_ranks=None,
    simulates=True,
    confines=True,
)
# 20 runs as NxDI's Benchmark class. A NeuronCore belongs to one process, and compiler and runtime
# write to places that differ from version to version.
DEVICE = Platform(
    name="device",
    times=Source.DEVICE,
    baseline_figures="measured here",
    runs=20,
    warm_ups=1,
    new_tokens=None,
    default_ranks=2,
    simulates=False,
    confines=False,
)


def platform() -> Platform:
    """The one that runs here; call `neuron_cpu.ensure_sdk()` first."""
    return STAND_IN if _is_stand_in() else DEVICE


@functools.cache
def _is_stand_in() -> bool:
    spec = importlib.util.find_spec("neuronxcc")
    origin = Path(spec.origin).resolve() if spec and spec.origin else None
    return origin is not None and neuron_cpu.SDK_ROOT in origin.parents


def today() -> bool:
    """Whether kernels are those of `nki` (SDK 2.29 and later) and not of `neuronxcc.nki`; on the
    stand-in, where NEURON_CPU_NKI names a release."""
    if _is_stand_in():
        return "NEURON_CPU_NKI" in os.environ
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return not importlib.metadata.version("nki").startswith(("0.1.", "0.2."))
    return False


@functools.cache
def real_libraries() -> Libraries | None:
    """NxD and NxD Inference themselves, where they run on the stand-in's lower tier."""
    return libraries.find(neuron_cpu.ROOTS) if _is_stand_in() else None


def version() -> str:
    """The SDK version asked for; with `identity` it keys a compiled folder."""
    return os.environ.get("NEURON_CPU_NXDI", "")


@functools.cache
def identity() -> str:
    """The stand-in's source text as a hash, or the versions of the installed SDK's packages."""
    if not _is_stand_in():
        packages = ("neuronx-cc", "neuronx-distributed", "neuronx-distributed-inference")
        return " ".join(f"{name}=={importlib.metadata.version(name)}" for name in packages)
    root = Path(neuron_cpu.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    real = real_libraries()
    return f"neuron_cpu {digest.hexdigest()}" + (f", {real.identity()}" if real else "")
