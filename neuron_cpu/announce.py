"""Names the device `neuron` to PyTorch; its room, `torch_device`, is loaded when a program uses it.

PyTorch calls `neuron` when it is imported, as the entry point of `announced` asks.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

ROOM = "neuron_cpu.torch_device"
LEAST = (2, 13)  # torch._C._acc, which lets a device be written in Python


def _too_old(version: str) -> bool:
    return tuple(int(part) for part in version.split(".")[:2]) < LEAST


def room(name: str) -> Any:
    """A module of the room; the first one sets the device up.

    Raises:
        ImportError: PyTorch is older than what a device in Python needs.
    """
    import torch

    if _too_old(torch.__version__):
        raise ImportError(
            f"The device neuron needs PyTorch {LEAST[0]}.{LEAST[1]} or later, got "
            f"{torch.__version__}; install a later one."
        )
    return importlib.import_module(f"{ROOM}.{name}")


class _Module(ModuleType):
    """`torch.neuron`: what PyTorch and libraries ask of every device, then the room's names."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Do nothing: `torch.manual_seed` has seeded the host's generator already."""

    @staticmethod
    def _is_in_bad_fork() -> bool:
        state = sys.modules.get(f"{ROOM}.state")
        return state is not None and state.STATE.forked

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(room("module"), name)

    def __dir__(self) -> list[str]:
        return dir(room("module"))


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator that makes tensors of the device."""
    return room("tensor").run(func, *args, **kwargs)


_KEPT: list[Any] = []  # a library's registrations end with it


def neuron() -> None:
    """Name the device in this process, once."""
    import torch
    from torch.utils import backend_registration

    if _KEPT:
        return
    module = _Module("torch.neuron")
    if _too_old(torch.__version__):  # programs without the device go on
        torch.neuron = sys.modules["torch.neuron"] = module  # type: ignore[attr-defined]
        return
    backend_registration._setup_privateuseone_for_python_backend("neuron", module)
    sys.modules["torch.neuron"] = module
    made, copied = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    made.fallback(_run, "PrivateUse1")
    # torch.tensor fills a new tensor beneath the place where tensors are told apart by class
    copied.impl("copy_", functools.partial(_run, torch.ops.aten.copy_.default), "PrivateUse1")
    _KEPT.extend((made, copied))
    _load_before_modules_move(torch)
    # pinning is for copies that overlap; here the device's memory is the host's
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore
    torch.Tensor.is_pinned = lambda self, device=None: False  # type: ignore
    torch.Generator = _generator(torch)  # type: ignore
    if torch.distributed.is_available():
        torch.distributed.Backend.register_backend(
            "neuron", _process_group, devices=["neuron", "cpu"]
        )
    for theirs, ours in _OF_ACCELERATOR.items():
        setattr(torch.accelerator, theirs, functools.partial(_of_module, ours))


# What torch.accelerator asks a device in C++ for, and the functions of `module` that answer.
_OF_THEIR_NAME = """
current_stream device_count empty_cache get_device_capability max_memory_allocated
max_memory_reserved memory_allocated memory_reserved memory_stats reset_accumulated_memory_stats
reset_peak_memory_stats set_stream synchronize
"""
_OF_ACCELERATOR = {
    **dict.fromkeys(("current_device_index", "current_device_idx"), "current_device"),
    **dict.fromkeys(("set_device_index", "set_device_idx"), "set_device"),
    "device_index": "device",
    "get_memory_info": "mem_get_info",
    **{name: name for name in _OF_THEIR_NAME.split()},
}


def _process_group(*args: Any) -> Any:
    return room("group").create(*args)


def _of_module(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(room("module"), name)(*args, **kwargs)


def _generator(torch: Any) -> Any:
    """`torch.Generator`, which refuses the device in a sentence."""
    theirs = torch.Generator

    class Kind(type(theirs)):  # type: ignore[misc]
        def __call__(cls, device: Any = "cpu") -> Any:
            if torch.device(device).type == "neuron":
                raise RuntimeError(
                    "torch.Generator is asked for on neuron, expected one on cpu, because "
                    "TorchNeuron draws its random numbers there (huggingface/diffusers, pull "
                    "request 13289); create torch.Generator() and pass that."
                )
            return theirs(device)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, theirs)

    return Kind("Generator", (theirs,), {"__module__": "torch"})


def _load_before_modules_move(torch: Any) -> None:
    """`Module.to` asks at its beginning how parameters change devices: the room knows."""
    parse = torch._C._nn._parse_to

    def parsed(*args: Any, **kwargs: Any) -> Any:
        found = parse(*args, **kwargs)
        if found[0] is not None and found[0].type == "neuron":
            torch._C._nn._parse_to = parse
            room("tensor")
        return found

    torch._C._nn._parse_to = parsed
    torch.nn.Module.neuron = lambda self, device=None: self.to(
        torch.device("neuron", device) if isinstance(device, int) else device or "neuron"
    )
