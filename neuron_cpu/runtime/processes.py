"""Ranks as processes that torchrun has started, one each, meeting through torch.distributed (gloo).

A collective is an all-gather of notes: what every rank is up to, with its tensor where that is
small, else a second all-gather follows. Each rank computes its own result from all tensors, in rank
order, with the function that ranks as threads use, so results are the same to the bit. Notes also
tell that a rank has failed or has ended its forward, which ends the call on all of them with the
reason. A rank whose process is gone breaks the
connection, and one that hangs is waited for as long as `Place.timeout_seconds` says.
"""

import contextlib
import zlib
from datetime import timedelta
from typing import Any, Callable, List, NoReturn, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from neuron_cpu.errors import CollectiveError
from neuron_cpu.sandbox import torchrun
from neuron_cpu.sandbox.torchrun import Place

from .rendezvous import Combine, RankStopped

# Of a note: this rank takes part in something, has ended, has failed, or takes part with a tensor
# that follows the note.
_MEETS, _ENDED, _FAILED, _MEETS_LARGE = range(4)
_TEXT_BYTES = 1024  # of a note: what the rank is up to, and a label or a reason
_SMALL_BYTES = 8192  # tensors up to it travel with the note: a row of 4096 features in bf16


class Processes:
    """The ranks of one torchrun as the process of one of them sees them."""

    def __init__(self, place: Place, group: Any) -> None:
        self.rank, self.size = place.rank, place.size
        self._group = group
        self._failure: Optional[BaseException] = None  # of the running call
        self._broken: Optional[CollectiveError] = None  # for good: the connection is gone

    def start(self) -> None:
        """Forget how the previous call ended; raises where the connection is gone."""
        if self._broken is not None:
            raise self._broken
        self._failure = None

    def exchange(
        self, rank: int, label: str, tensor: torch.Tensor, combine: Combine
    ) -> torch.Tensor:
        """Meet the other ranks with `tensor`; returns the part of `combine`'s result for `rank`,
        this one's number."""
        if self._failure is not None:
            raise RankStopped
        whole = tensor.contiguous()
        if whole.nbytes <= _SMALL_BYTES:
            carried = self._compare_notes(_MEETS, label, _as_bytes(whole))
            parts = [data[: whole.nbytes].view(whole.dtype).view(whole.shape) for data in carried]
        else:
            self._compare_notes(_MEETS_LARGE, label)
            parts = [torch.empty_like(whole) for _ in range(self.size)]
            self._gather(label, [_as_bytes(part) for part in parts], _as_bytes(whole))
        return combine(parts)[rank]

    def call(self, function: Callable[[], Any], label: str) -> Any:
        """Run this rank's part of a call that all ranks make; raises the failure of any.

        `label` describes the call and has to be the same on every rank.
        """
        self.start()
        try:
            self._compare_notes(_MEETS, label)
            result = function()
            if self._failure is None:  # a model may have swallowed the end of a collective
                self._compare_notes(_ENDED, "")
        except RankStopped:
            pass
        except BaseException as error:
            self._tell(error)
            raise
        if self._failure is not None:
            raise self._failure
        return result

    def from_first(self, tensors: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """Rank 0's tensors on every rank, which has to have some of the same shapes and dtypes."""
        label = f"outputs {[(str(tensor.dtype), list(tensor.shape)) for tensor in tensors]}"
        try:
            self._compare_notes(_MEETS, label)
            return [self._from_first(tensor, label) for tensor in tensors]
        except RankStopped:
            assert self._failure is not None
            raise self._failure from None

    def _from_first(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        whole = tensor.contiguous() if self.rank == 0 else torch.empty_like(tensor).contiguous()
        if whole.numel():
            self._connected(label, lambda: self._group.broadcast(_as_bytes(whole), 0))
        return whole

    def _tell(self, error: BaseException) -> None:
        """Tell the other ranks why this rank stops; ranks that are gone do not matter."""
        if self._failure is None and self._broken is None:
            self._failure = error
            with contextlib.suppress(CollectiveError):  # this rank's own reason counts
                self._all_notes(_FAILED, " ".join(str(error).split()) or type(error).__name__)

    def _compare_notes(
        self, kind: int, label: str, carried: Optional[torch.Tensor] = None
    ) -> List[torch.Tensor]:
        """The bytes that all ranks carry; RankStopped, with a failure noted, unless all are in the
        same collective.

        `carried` has at most _SMALL_BYTES; results have padding behind them.
        """
        notes, data = self._all_notes(kind, label, carried)
        reason = _disagreement(notes)
        if reason is not None:
            self._failure = CollectiveError(reason)
            raise RankStopped
        return data

    def _all_notes(
        self, kind: int, text: str, carried: Optional[torch.Tensor] = None
    ) -> Tuple[List[Tuple[int, str]], List[torch.Tensor]]:
        """Every rank's note of its collective, and the bytes that it carries, in rank order."""
        said = bytes([kind]) + text.encode("utf-8", errors="replace")[: _TEXT_BYTES - 1]
        note = torch.zeros(_TEXT_BYTES + _SMALL_BYTES, dtype=torch.uint8)
        note[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        if carried is not None:
            note[_TEXT_BYTES : _TEXT_BYTES + len(carried)] = carried
        notes = [torch.empty_like(note) for _ in range(self.size)]
        self._gather(text or "its end", notes, note)
        texts = [other[:_TEXT_BYTES].numpy().tobytes() for other in notes]
        return [
            (told[0], told[1:].rstrip(b"\0").decode("utf-8", errors="replace")) for told in texts
        ], [other[_TEXT_BYTES:] for other in notes]

    def _gather(self, label: str, parts: List[torch.Tensor], own: torch.Tensor) -> None:
        """Fill `parts` with the ranks' bytes; bytes travel, so every dtype does."""
        self._connected(label, lambda: self._group.allgather([parts], [own]))

    def _connected(self, label: str, operation: Callable[[], Any]) -> None:
        """Wait for an operation of the group; its errors mean that ranks are gone or hang."""
        try:
            operation().wait()
        except RuntimeError as error:
            self._lose(label, error)

    def _lose(self, label: str, error: RuntimeError) -> NoReturn:
        self._broken = CollectiveError(
            f"Rank {self.rank} of {self.size} has lost the others in {label or 'a call'} "
            f"({_why_lost(error)}), expected all of them to arrive in time; see what the rank that "
            "ended first says."
        )
        self._failure = self._broken
        raise self._broken from error


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _why_lost(error: BaseException) -> str:
    """An error of PyTorch's transport, in words for a user."""
    late = any(word in str(error).lower() for word in ("timed out", "timeout", "waiting for"))
    return "nobody answers" if late else "the process of another one, or torchrun, has ended"


def _disagreement(notes: Sequence[Tuple[int, str]]) -> Optional[str]:
    """Why the ranks cannot go on together, in one sentence; None where they can."""
    for rank, (kind, text) in enumerate(notes):
        if kind == _FAILED:
            return f"Rank {rank} failed: {text.rstrip('.')}."
    waiting = [rank for rank, (kind, _) in enumerate(notes) if kind not in (_ENDED, _FAILED)]
    gone = [rank for rank, (kind, _) in enumerate(notes) if kind == _ENDED]
    if waiting and gone:
        return (
            f"Ranks {waiting} wait in {notes[waiting[0]][1]} for rank {gone[0]}, which has "
            "ended its forward, expected every rank to take part in every collective; do not "
            "let the number of collectives depend on the rank or on tensor values."
        )
    if len({text for _, text in notes}) > 1:
        described = ", ".join(f"rank {rank}: {text}" for rank, (_, text) in enumerate(notes))
        return (
            f"Ranks met in different collectives ({described}), expected the same operation, "
            "dtype and shape on every rank; make the model's forward alike on all ranks."
        )
    return None


def digest(inputs: Sequence[torch.Tensor]) -> str:
    """A short digest of tensors' values: ranks of one call must have equal inputs."""
    value = 0
    for tensor in inputs:
        if tensor.numel():
            value = zlib.crc32(_as_bytes(tensor.contiguous()).numpy().data, value)
    return f"{value:08x}"


_joined: Optional[Processes] = None


def join(place: Place) -> Processes:
    """Become rank `place.rank` for the rest of this process, once all others have joined.

    A CollectiveError where they do not come within `place.timeout_seconds`.
    """
    global _joined
    wait = timedelta(seconds=place.timeout_seconds)
    try:
        store = dist.TCPStore(place.address, place.port, is_master=False, timeout=wait)
        named = dist.PrefixStore(f"neuron_cpu/{place.group}", store)
        # A group of its own: a script may use torch.distributed for other things.
        group = dist.ProcessGroupGloo(named, place.rank, place.size, wait)
    except RuntimeError as error:
        raise CollectiveError(
            f"Rank {place.rank} of {place.size} cannot join the others at {place.address}:"
            f"{place.port} ({_why_lost(error)}), expected all of them within "
            f"{place.timeout_seconds:g} s; see what the rank that ended first says."
        ) from error
    _joined = Processes(place, group)
    return _joined


def joined(size: int) -> Optional[Processes]:
    """The ranks of a model of `size` ranks, where they are processes; joins them on the first call.

    A model of one rank runs in any process alone. A CollectiveError where torchrun has started
    another number of processes.
    """
    place = torchrun.place()
    if size == 1:
        return None
    ranks = _joined
    if ranks is None:
        if place is None:
            return None
        ranks = join(place)
    if ranks.size != size:
        raise CollectiveError(
            f"The model has a tensor-parallel degree of {size}, expected {ranks.size} ranks in "
            "all, the number of processes that torchrun has started; give both the same."
        )
    return ranks


def rank_0_says(value: bool) -> bool:
    """Rank 0's value on every rank of this process's group."""
    if _joined is None:
        raise CollectiveError("This process has joined no ranks, expected those of torchrun.")
    return bool(_joined.from_first([torch.tensor(value)])[0])
