"""The line between a process that prefills and one that decodes: two ranks, point to point (gloo).

In the SDK the transfer engine behind `NeuronConnector` moves rows from device to device over EFA.
Here two processes of `torch.distributed` do it, which must be connected before a submission is
confined: no connection is made afterwards.
"""

from datetime import timedelta
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist

from neuron_cpu.errors import CollectiveError
from neuron_cpu.processes.torchrun import Place

PREFILL, DECODE = 0, 1  # ranks
SIDES = ("prefill side", "decode side")


class TransferLine:
    """One process's end of the line. A send waits for its receive, as long as the place says."""

    def __init__(self, place: Place, group: Any) -> None:
        self._place, self._group = place, group
        self._other = 1 - place.rank

    def send(self, tensor: torch.Tensor) -> None:
        """Give the other side a contiguous tensor; CollectiveError where it is gone or mute."""
        self._wait(lambda: self._group.send([_as_bytes(tensor)], self._other, 0))

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor with what the other side sends; bytes, so any dtype."""
        self._wait(lambda: self._group.recv([_as_bytes(tensor)], self._other, 0))

    def _wait(self, operation: Callable[[], Any]) -> None:
        try:
            operation().wait()
        except RuntimeError as error:
            raise CollectiveError(
                f"The {SIDES[self._other]} is gone or mute ({_one_line(error)}), expected it to "
                f"take part in a transfer within {self._place.timeout_seconds:g} s; see what it "
                "says, and start both sides anew."
            ) from error


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _one_line(error: BaseException) -> str:
    told = " ".join(str(error).split()).rpartition("] ")[2]  # without gloo's own source line
    return told[:120].rstrip(".")


_joined: Optional[TransferLine] = None


def join(place: Place) -> TransferLine:
    """Become the side `place.rank` for the rest of this process, once the other one has come.

    `place.interface` is the address at which the other side reaches this machine. CollectiveError
    where the other side does not come within `place.timeout_seconds`.
    """
    global _joined
    wait = timedelta(seconds=place.timeout_seconds)
    try:
        store = dist.TCPStore(place.address, place.port, is_master=False, timeout=wait)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = wait
        host = place.interface or place.address
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        named = dist.PrefixStore(f"neuron_cpu/{place.group}", store)
        group = dist.ProcessGroupGloo(named, place.rank, 2, options)
    except RuntimeError as error:
        raise CollectiveError(
            f"The {SIDES[1 - place.rank]} cannot be met through {place.address}:{place.port} "
            f"({' '.join(str(error).split())[:160].rstrip('.')}), expected it within "
            f"{place.timeout_seconds:g} s; see what it says, and whether its machine lets "
            "connections in."
        ) from error
    _joined = TransferLine(place, group)
    return _joined


def joined() -> TransferLine:
    """This process's end; CollectiveError where there is none."""
    if _joined is None:
        raise CollectiveError(
            "This process has no line to another one, expected `join` before a transfer."
        )
    return _joined
