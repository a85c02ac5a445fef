"""`init_process_group("neuron")`: gloo over the host's memory of the tensors.

Sources: AWS Neuron documentation, guide to torch.distributed of TorchNeuron. Each process is one
logical core. Collectives of PyTorch come to `tensor.run` as every operator does; collectives inside
of kernels meet here, through messages between the processes of a replica group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from neuron_cpu.core.device import ranks
from neuron_cpu.core.device.dtypes import Tensors
from neuron_cpu.core.device.errors import current_place, refuse

from .around import around
from .state import STATE

_LABEL_BYTES = 256
_C10D: Any = torch._C._distributed_c10d


class TooLate(AssertionError, RuntimeError):
    """A process group after the device was used: its cores are chosen already."""


def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The process group of a backend that `init_process_group` or `new_group` makes.

    Raises:
        TooLate: the device is in use, and there is no group yet.
    """
    if STATE.used and STATE.rank is None:
        raise TooLate(
            "init_process_group('neuron') comes after the device was used, expected before, "
            "because it chooses the process's core; call it before the first tensor on neuron."
        )
    made = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    if STATE.rank is None:
        STATE.rank = Process()
    return made


@around(dist.ProcessGroup, "_start_coalescing")
def _start(theirs: Any, self: Any, device: torch.device) -> None:
    """Begin a block of collectives that a device joins; gloo runs them one by one."""
    if device.type != "neuron":
        theirs(self, device)


@around(dist.ProcessGroup, "_end_coalescing")
def _end(theirs: Any, self: Any, device: torch.device) -> Any:
    if device.type != "neuron":
        return theirs(self, device)
    done: Any = torch.futures.Future()
    done.set_result(None)
    return _C10D._create_work_from_future(done)


class Process:
    """This process as a rank of kernels' collectives."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    def meet(self, label: str, members: ranks.Members, parts: Tensors) -> list[Tensors]:
        """The parts of all members, in their order; blocks until all have sent theirs.

        Raises:
            NkiError: another process is in another collective, or there is no such process.
        """
        if max(members) >= self.size:
            raise refuse(
                "sim_rank_missing",
                f"{label} waits for rank {max(members)}, expected ranks of {self.size} processes; "
                "start more of them with torchrun, or correct the replica group",
                current_place(),
            )
        mine = torch.zeros(_LABEL_BYTES, dtype=torch.uint8)
        said = label.encode()[:_LABEL_BYTES]
        mine[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        told = {
            member: bytes(sent[0].tolist()).rstrip(b"\0").decode()
            for member, sent in self._exchanged(members, [mine]).items()
        }
        if len(set(told.values())) > 1:
            raise refuse(
                "sim_ranks_differ",
                f"ranks meet in different collectives, {told}, expected the same operation, shape "
                "and type on each; make control flow equal on all ranks",
                current_place(),
            )
        whole = [part.contiguous() for part in parts]
        sent = self._exchanged(members, [part.reshape(-1).view(torch.uint8) for part in whole])
        return [
            [data.view(part.dtype).view(part.shape) for data, part in zip(sent[member], whole)]
            for member in members
        ]

    def _exchanged(self, members: ranks.Members, parts: Tensors) -> dict[int, Tensors]:
        """What each member sent: bytes of the same sizes as this rank's."""
        made = {member: [torch.empty_like(part) for part in parts] for member in members}
        waiting = []
        for member in members:
            if member == self.rank:
                made[member] = [part.clone() for part in parts]
                continue
            waiting += [dist.isend(part, member) for part in parts]
            waiting += [dist.irecv(part, member) for part in made[member]]
        for work in filter(None, waiting):  # None: this process is no member
            work.wait()
        return made


@contextmanager
def ranked() -> Iterator[None]:
    """Inside the block kernels run as this process's rank."""
    if STATE.rank is None or not dist.is_initialized():
        yield
        return
    with ranks.being(STATE.rank):
        yield
