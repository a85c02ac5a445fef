"""`torch.neuron`, and the functions that `torch_neuronx` has of it.

Names: AWS Neuron documentation, TorchNeuron's reference, and the programs of docs/torch_device.md.
Streams and events have nothing to do, because each operator ends before the next one begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from .state import STATE


def is_initialized() -> bool:
    return STATE.used


is_neuron_runtime_initialized = is_initialized


def init() -> None:
    STATE.device()


# --- cores ----------------------------------------------------------------------------------------
def device_count() -> int:
    """Logical cores; under a process group each process has one."""
    dist = torch.distributed
    return 1 if dist.is_available() and dist.is_initialized() else STATE.cores()


def current_device() -> int:
    return STATE.current


def _index(device: Any) -> int:
    if device is None or isinstance(device, int):
        return STATE.index(device)
    return STATE.index(torch.device(device).index)


def set_device(device: Any) -> None:
    """Make a core the current one; None keeps it.

    Raises:
        ValueError: there is no such core.
    """
    STATE.current = _index(device)


@contextmanager
def device(device: Any) -> Iterator[None]:
    """Inside the block `device` is the current core."""
    before = STATE.current
    set_device(device)
    try:
        yield
    finally:
        STATE.current = before


def get_device_name(device: Any = None) -> str:
    return f"neuron:{_index(device)}"


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Name and memory of a core: a quarter of a Trainium2's HBM, as four logical cores share it."""
    return SimpleNamespace(name=get_device_name(device), total_memory=24 * 2**30)


def get_device_capability(device: Any = None) -> None:
    _index(device)


def synchronize(device: Any = None) -> None:
    _index(device)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float32, torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


# --- memory: the tensors' own bytes, for nothing is kept beside them ------------------------------
def memory_allocated(device: Any = None) -> int:
    _index(device)
    return STATE.memory["allocated"]


def max_memory_allocated(device: Any = None) -> int:
    _index(device)
    return STATE.memory["peak"]


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    _index(device)
    STATE.memory["peak"] = STATE.memory["allocated"]


reset_accumulated_memory_stats = reset_max_memory_allocated = reset_peak_memory_stats


def memory_stats(device: Any = None) -> dict[str, int]:
    now, peak = memory_allocated(device), max_memory_allocated(device)
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
    return {
        f"{kind}.all.{when}": value
        for kind in kinds
        for when, value in (("current", now), ("peak", peak))
    }


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return "\n".join(f"{name}: {value}" for name, value in memory_stats(device).items())


def mem_get_info(device: Any = None) -> tuple[int, int]:
    total = get_device_properties(device).total_memory
    return total - memory_allocated(device), total


def empty_cache() -> None:
    """Do nothing: no memory is kept that no tensor has."""


memory = SimpleNamespace(
    **{
        name: found
        for name, found in list(globals().items())
        if "memory" in name or name in ("empty_cache", "mem_get_info")
    }
)


# --- streams and events ---------------------------------------------------------------------------
class Stream:
    """A queue of operators, which are done when they come back."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = torch.device("neuron", _index(device))
        self.device_index, self.stream_id = self.device.index, 0

    def query(self) -> bool:
        return True

    def synchronize(self, *_: Any) -> None:
        """Return at once."""

    wait_stream = wait_event = synchronize

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        """Leave the block."""


class Event:
    """A place in a stream: it is passed when it is recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.at: float | None = None if enable_timing else 0.0
        self.enable_timing = enable_timing

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    synchronize = wait

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds on this machine from this event to `end`."""
        if not (self.enable_timing and end.enable_timing) or self.at is None or end.at is None:
            raise RuntimeError(
                "elapsed_time asks events that keep no time, expected two recorded ones with "
                "enable_timing=True; create them so, and record both."
            )
        return 1e3 * (end.at - self.at)


def current_stream(device: Any = None) -> Stream:
    return Stream(device)


default_stream = current_stream


def stream(stream: Any) -> Any:
    return stream if stream is not None else Stream()


def set_stream(stream: Any) -> None:
    """Do nothing: all streams are one."""


# --- random numbers come from the host's generator ------------------------------------------------
def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


seed = seed_all = torch.default_generator.seed
initial_seed = torch.default_generator.initial_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.default_generator.set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    set_rng_state(states[0])


# --- what ran -------------------------------------------------------------------------------------
def get_fallback_ops() -> list[str]:
    """Operators that the device left to the CPU."""
    return sorted(STATE.fallbacks)


def get_executed_ops() -> list[str]:
    """Operators of the device."""
    return sorted(STATE.executed)


def clear_op_tracking() -> None:
    STATE.executed.clear()
    STATE.fallbacks.clear()


def get_dynamo_metrics() -> dict[str, int]:
    return dict(STATE.compiled)


def reset_dynamo_metrics() -> None:
    STATE.compiled.clear()
