"""What the device `neuron` of this process knows: its cores, its memory, what ran on it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from neuron_cpu.core.device.target import named_cores

LOGGER = logging.getLogger("torch_neuronx")


class Held:
    """Bytes of the device that are taken for as long as this lives."""

    __slots__ = ("bytes", "storage")
    memory = {"allocated": 0, "peak": 0}  # of all that live

    def __init__(self, size: int) -> None:
        self.storage: Any = None  # the storage of PyTorch over them, where somebody asked
        self.bytes = 0
        self.resize(size)

    def resize(self, size: int) -> None:
        memory = self.memory
        memory["allocated"] += size - self.bytes
        memory["peak"] = max(memory["peak"], memory["allocated"])
        self.bytes = size

    def __del__(self) -> None:
        self.memory["allocated"] -= self.bytes


class _State:
    def __init__(self) -> None:
        self.memory = Held.memory
        self.executed: set[str] = set()
        self.fallbacks: set[str] = set()
        self.compiled: dict[str, int] = {}  # counts of compiled graphs
        self.observer: Callable[..., None] | None = None  # sees every operator
        # sees a kernel's arguments on the host, and gives what sees the call when it is done
        self.before_kernel: Callable[..., Callable] | None = None
        self.regions: Callable[..., Any] | None = None  # opens a compiled graph's call
        # takes a graph of torch_neuronx.trace that runs: its name, and its events
        self.graphs: Callable[[str, list], None] | None = None
        self.rank: Any = None  # of kernels' collectives, where processes form a group
        self.used = self.forked = False
        self.current = 0
        self._devices: dict[int, torch.device] = {}
        os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        self.forked = self.used

    def refuse_fork(self) -> None:
        raise RuntimeError(
            "Cannot re-initialize neuron in a forked subprocess, expected a process of its own "
            "after the device was used; start it with the 'spawn' method of multiprocessing."
        )

    def region(self, name: str, graph: Any) -> AbstractContextManager[None]:
        """A call of a compiled graph, for whoever observes."""
        return nullcontext() if self.regions is None else self.regions(name, graph)

    def cores(self) -> int:
        """Logical cores: what the runtime's variables or torchrun name, else one."""
        processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
        return max(named_cores() or 1, int(processes) if processes.isdigit() else 1)

    def index(self, index: int | None) -> int:
        """A valid index of a core; ValueError names the valid ones."""
        if index is None:
            return self.current
        if not 0 <= index < self.cores():
            raise ValueError(
                f"neuron:{index} is no device of this process, expected an index from 0 to "
                f"{self.cores() - 1}; set NEURON_RT_NUM_CORES for more cores."
            )
        return index

    def device(self, index: int | None = None) -> torch.device:
        """The device of an index, else the current one; from here on the device is in use."""
        found = self._devices.get(self.current if index is None else index)
        if found is None:
            at = self.index(index)
            if self.forked:
                self.refuse_fork()
            self.used = True
            found = self._devices[at] = torch.device("neuron", at)
        return found


STATE = _State()
