"""The runtime's SPMDModel: one compiled graph on all ranks."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from neuron_cpu.errors import CheckpointError, StandInError
from neuron_cpu.runtime import executed, rounding
from neuron_cpu.runtime.ranks import RankPool
from neuron_cpu.runtime.tape import Tape

Tensors = dict[str, torch.Tensor]


@functools.cache
def ranks(size: int) -> RankPool:
    """The ranks of this process's models; they run one call at a time."""
    return RankPool(size)


class SPMDModel:
    """One graph that every rank runs on its own weights and states, which all graphs share."""

    def __init__(self, neff: bytes, metaneff: bytes, local_ranks: int, world_size: int) -> None:
        if local_ranks != world_size:
            raise StandInError(
                f"A model of {world_size} ranks is to have {local_ranks} here, expected all of "
                "them, because several machines are not modelled; set local_ranks_size to the "
                "world size."
            )
        self.neff, self.metaneff, self.world_size = neff, metaneff, world_size
        self._ready = False
        self.executed: list[executed.Counts] = []  # of watched calls
        self._tape: Any = None
        self._states: list[Tensors] = []
        self._weights: list[Tensors] = []

    def __getstate__(self) -> tuple:
        return self.neff, self.metaneff, self.world_size

    def __setstate__(self, state: tuple) -> None:
        neff, metaneff, world_size = state
        self.__init__(neff, metaneff, world_size, world_size)  # type: ignore[misc]

    @property
    def tape(self) -> Tape:
        """The tape that every rank runs."""
        if self._tape is None:
            self._tape = Tape.from_bytes(self.neff)
        return self._tape

    def set_mock_initialized(self, mock: bool) -> None:
        """Do nothing: only a TorchScript trace needs it."""

    def is_initialized(self) -> bool:
        return self._ready

    def initialize(self, states: list[Tensors], weights: list[Tensors], start_rank: int) -> None:
        """Take the ranks' tensors; CheckpointError names a weight that a rank lacks."""
        if start_rank:
            raise StandInError(
                f"A model begins at rank {start_rank}, expected 0, because several machines are "
                "not modelled; leave start_rank_id out."
            )
        for rank, own in enumerate(weights):
            missing = [name for name in self.tape.weights if name not in own]
            if missing:
                raise CheckpointError(
                    f"The weights of rank {rank} lack {len(missing)} tensors that the graph reads "
                    f"({', '.join(missing[:4])}), expected one for each; name them in "
                    "convert_hf_to_neuron_state_dict."
                )
            for name in self.tape.weights:
                _check(f"The weight {name} of rank {rank}", own[name], self.tape.types[name])
        read = self.tape.weights
        self._weights = [{name: _owned(own[name]) for name in read} for own in weights]
        self._states, self._ready = list(states), True
        if not any(states):  # a graph without states
            self._states = [{} for _ in weights]

    def forward(self, inputs: list[torch.Tensor]) -> list[Any]:
        """Run one call; returns rank 0's outputs without the states."""
        return self._run([inputs] * self.world_size)[0]

    def forward_ranked(self, inputs: Sequence[list[torch.Tensor]]) -> list[list[Any]]:
        """Run one call on each rank's own inputs; returns all ranks' outputs, in their memory."""
        return [[InRank.of(value) for value in own] for own in self._run(inputs)]

    forward_async = forward_ranked  # the host waits: what runs beside it is the same

    def _run(self, inputs: Sequence[list[torch.Tensor]]) -> list[list[Any]]:
        tape, pool = self.tape, ranks(self.world_size)
        for own in inputs:
            for place, (tensor, form) in enumerate(zip(own, tape.input_types, strict=True)):
                _check(f"Input {place} of the graph", tensor, form)

        def on(rank: int) -> Any:
            own = [tensor.as_subclass(torch.Tensor).clone() for tensor in inputs[rank]]
            run = functools.partial(tape.run, own, self._weights[rank], self._states[rank])

            def call() -> list[Any]:
                with rounding.of_graph():
                    return executed.counted(self.executed, run)

            return call

        return pool.run([on(rank) for rank in range(self.world_size)])


_COPIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of weights that graphs share


def _owned(weight: torch.Tensor) -> torch.Tensor:
    """A weight in memory of its own, as a device has it: NxD Inference maps its files, and the
    next compile into their folder writes them anew. Storages of PyTorch's own can be resized."""
    if weight.untyped_storage().resizable():
        return weight
    if weight not in _COPIES:
        _COPIES[weight] = weight.clone()
    return _COPIES[weight]


@dataclass(frozen=True)
class _Memory:
    """A rank's memory in place of a torch.device."""

    type: str
    index: int


class InRank(torch.Tensor):
    """A tensor whose device tells NxDI that it lies in a rank's memory; `cpu` fetches it."""

    @staticmethod
    def of(value: Any) -> Any:
        return value.as_subclass(InRank) if isinstance(value, torch.Tensor) else value

    @property
    def device(self) -> Any:  # type: ignore[override]
        """The runtime's device, named as NxDI asks, also where PyTorch calls it neuron."""
        return _Memory("privateuseone", 0)

    def cpu(self, *_: Any, **_options: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.cpu().to(*args, **kwargs)


def _check(what: str, tensor: torch.Tensor, form: tuple) -> None:
    """Refuse a tensor whose shape or type the graph was not compiled for."""
    if (tuple(tensor.shape), tensor.dtype) != form:
        raise StandInError(
            f"{what} has shape {list(tensor.shape)} and {tensor.dtype}, expected {list(form[0])} "
            f"and {form[1]}, which the graph was compiled for; compile for it, or save the "
            "checkpoint in that type."
        )
