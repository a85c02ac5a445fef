"""The names of torch_xla that model files and NxD import. No XLA device exists here."""

from types import SimpleNamespace

import torch

from neuron_cpu.closed import stand_for

from . import names  # noqa: F401 - the device by its name
from .core import xla_model

__all__ = ["device", "sync"]

# of training, which the stand-in does not do
stand_for(*("torch_xla." + part for part in ("distributed", "experimental", "utils")))

# NxD 0.10 to 0.16 name it, and PyTorch 2.8 and later have it as FileLike.
if not hasattr(torch.serialization, "FILE_LIKE"):
    torch.serialization.FILE_LIKE = torch.serialization.FileLike  # type: ignore[attr-defined]

# The compiler's debugging information: there is none to switch.
_XLAC = SimpleNamespace(_set_ir_debug=lambda on: None, _get_ir_debug=lambda: False)


def device() -> torch.device:
    """The device on which the stand-in computes: the CPU."""
    return xla_model.xla_device()


def sync(wait: bool = False) -> None:
    """Do nothing: the stand-in executes at once. It is the later name of `mark_step`."""
    del wait
