"""Which SDK runs here; asked only where the answer is printed, or is part of a compiled folder."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
from pathlib import Path

import neuron_cpu

STAND_IN_LABEL = "wall clock of the CPU simulator, not a device time"
DEVICE_LABEL = "measured on the device"


@functools.cache
def is_stand_in() -> bool:
    """Whether the SDK's names come from neuron_cpu; call `neuron_cpu.ensure_sdk()` first."""
    spec = importlib.util.find_spec("neuronxcc")
    origin = Path(spec.origin).resolve() if spec and spec.origin else None
    return origin is not None and neuron_cpu.SDK_ROOT in origin.parents


def time_label() -> str:
    """What a wall-clock time of this process is worth."""
    return STAND_IN_LABEL if is_stand_in() else DEVICE_LABEL


@functools.cache
def identity() -> str:
    """The stand-in's source text as a hash, or the versions of the installed SDK's packages."""
    if not is_stand_in():
        packages = ("neuronx-cc", "neuronx-distributed", "neuronx-distributed-inference")
        return " ".join(f"{name}=={importlib.metadata.version(name)}" for name in packages)
    root = Path(neuron_cpu.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"neuron_cpu {digest.hexdigest()}"
