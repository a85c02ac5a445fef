"""Names of Lite that mean what TorchNeuron's mean.

Source: aws-neuron/vllm-omni-neuron cb7cf2b, lite_compat.py and bootstrap.py. Lite's own rules (no
eager collectives on the device, its registry of meshes) are not imitated.
"""

import os
import sys
from types import ModuleType
from typing import Any

from torch_neuronx import nki_op, wrap_nki

from neuron_cpu.core.device.target import DEFAULT, ENVIRONMENT_VARIABLE


def get_platform_target() -> str:
    """The chip that kernels are built for: trn2, trn3, ..."""
    return os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT


def _module(path: str, **names: Any) -> None:
    whole = f"{__name__}.{path}"
    made = ModuleType(whole)
    made.__path__ = []  # type: ignore[attr-defined]
    vars(made).update(names)
    sys.modules[whole] = made
    parent, _, last = whole.rpartition(".")
    setattr(sys.modules[parent], last, made)


_module("nki")
_module("nki.nki_hop", wrap_nki=wrap_nki)
_module("_compiler")
_module("_compiler.nki_op", nki_op=nki_op)
_module("compile")
_module("compile.platform", get_platform_target=get_platform_target)
