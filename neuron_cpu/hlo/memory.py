"""The runtime as Transformers NeuronX sees it: tensors of ranks, loaded models, operators.

A rank's memory is a PyTorch tensor on the CPU. Names and arguments: aws-neuron/transformers-neuronx
1ade6d7 (ops.py, compiler.py, parallel.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import StandInError
from .execute import Executable

_DEVICE = torch.device("xla", 0)  # as the package tells its device tensors from others


class DeviceTensor(torch.Tensor):
    """The same shape in the memory of each rank; only the runtime's operators read it.

    Attributes:
        ranks: the tensors, rank 0 first.
    """

    ranks: list[torch.Tensor]

    @staticmethod
    def of(ranks: Sequence[torch.Tensor]) -> DeviceTensor:
        """A tensor that consists of these; they are not copied."""
        first = ranks[0]
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            DeviceTensor, first.shape, strides=first.stride(), dtype=first.dtype, device=_DEVICE
        )
        made.ranks = list(ranks)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls.of(args[0].ranks)
        raise StandInError(
            f"{function} was called on a tensor in the memory of ranks, expected one of the CPU; "
            "bring it there with transformers_neuronx.ops.parallel_cpu."
        )

    __repr__ = object.__repr__  # type: ignore[assignment]


class ParallelTensorSet:
    """The inputs or outputs of a graph, by number."""

    def __init__(self, names: Sequence[str], ranks: int) -> None:
        self.tensors: list[Any] = [None] * len(names)

    def init(self) -> None:
        """Forget the tensors."""
        self.tensors = [None] * len(self.tensors)

    def add(self, index: int, tensor: DeviceTensor) -> None:
        """Put a tensor in its place."""
        self.tensors[index] = tensor


class ParallelModel:
    """A compiled graph on neighbouring ranks."""

    def __init__(self, neff: bytes, ranks: int, first_rank: int = 0, all_ranks: int = 0) -> None:
        if all_ranks not in (0, ranks):
            raise StandInError(
                f"The graph joins {all_ranks} ranks of which {ranks} are here, expected all in one "
                "process; neuron_cpu has no several instances, so leave out their settings."
            )
        self._neff, self._ranks = neff, ranks
        self._loaded: Any = None

    def load(self) -> None:
        """Compile the graph for the CPU.

        Raises:
            CompileError: the file is none of ours, or XLA refuses the graph.
        """
        self._loaded = Executable(self._neff, self._ranks)

    def run(self, inputs: ParallelTensorSet, outputs: ParallelTensorSet) -> None:
        """Execute on all ranks, and write the outputs into their tensors."""
        results = self._loaded([tensor.ranks for tensor in inputs.tensors])
        for output, result in zip(outputs.tensors, results):
            for place, value in zip(output.ranks, result):
                _write(place, value)


def _write(place: torch.Tensor, value: torch.Tensor) -> None:
    """Write a result into memory, its first part where that is larger (a smaller bucket)."""
    if place.dtype != value.dtype:
        value = value.view(place.dtype)
    if place.shape != value.shape:
        place, value = place.view(-1)[: value.numel()], value.flatten()
    place.copy_(value)


class ParallelExecutor:
    """A graph with its memory, that is given inputs and gives outputs."""

    def __init__(
        self,
        model: ParallelModel,
        all_inputs: ParallelTensorSet,
        all_outputs: ParallelTensorSet,
        inputs: Sequence[DeviceTensor],
        outputs: Sequence[DeviceTensor],
    ) -> None:
        self._model, self._memory = model, (all_inputs, all_outputs)
        self._inputs, self._outputs = inputs, outputs

    def run(self, inputs: Sequence[torch.Tensor], return_ranks: int) -> list[list[torch.Tensor]]:
        """Outputs by number and rank; `return_ranks` of them, all for -1."""
        for buffer, value in zip(self._inputs, inputs):
            parallel_write(buffer, [value] * len(buffer.ranks))
        self._model.run(*self._memory)
        if return_ranks == 0:
            return []
        count = None if return_ranks < 0 else return_ranks
        return [[rank.clone() for rank in output.ranks[:count]] for output in self._outputs]


class Model:
    """A compiled graph of one rank."""

    def __init__(self, neff: bytes, metaneff: bytes) -> None:
        self._neff = neff

    def set_neuron_devices(self, first: int, count: int) -> None:
        """Choose cores; there is one CPU."""

    def load(self) -> None:
        """Compile the graph for the CPU."""
        self._loaded = Executable(self._neff, 1)

    def run(self, inputs: Sequence[DeviceTensor]) -> list[DeviceTensor]:
        """The outputs, in memory of their own."""
        return [DeviceTensor.of(ranks) for ranks in self._loaded([t.ranks for t in inputs])]


def parallel_to(tensors: Sequence[torch.Tensor]) -> DeviceTensor:
    """Copy a tensor of each rank into its memory."""
    return DeviceTensor.of([tensor.detach().clone().contiguous() for tensor in tensors])


def parallel_from(tensor: DeviceTensor) -> list[torch.Tensor]:
    """Copy the ranks' tensors out of their memory."""
    return [rank.clone() for rank in tensor.ranks]


def parallel_write(tensor: DeviceTensor, values: Sequence[torch.Tensor]) -> None:
    """Overwrite the ranks' memory."""
    for place, value in zip(tensor.ranks, values):
        place.copy_(value)


def parallel_slice(tensor: DeviceTensor, dim: int, start: int, end: int, step: int) -> DeviceTensor:
    """A part that shares the memory."""
    places = [slice(None)] * tensor.dim()
    places[dim] = slice(start, end, step)
    return DeviceTensor.of([rank[tuple(places)] for rank in tensor.ranks])


def _load_collectives(model: Model, first: int, count: int, first_all: int, all: int) -> None:
    if all > 1:
        raise StandInError(
            f"Model was loaded as one of {all} ranks, expected one; take ParallelModel, as every "
            "model of Transformers NeuronX does."
        )
    model.load()


def _no_profile(*_: Any) -> Any:
    raise StandInError(
        "A profile of a device (.ntff) was asked for, and no device is here; estimates of a "
        "kernel's time are what `python -m neuron_cpu profile` gives."
    )


CLASSES = {
    "Model": Model,
    "ParallelModel": ParallelModel,
    "ParallelTensorSet": ParallelTensorSet,
    "ParallelExecutor": ParallelExecutor,
}


def _init() -> None:
    """Open the runtime; there is nothing to open."""


OPERATORS = {
    "_init_neuron": _init,
    "_to_neuron": lambda tensor, rank: parallel_to([tensor]),
    "_from_neuron": lambda tensor: tensor.ranks[0].clone(),
    "_slice_neuron": parallel_slice,
    "_load_neuron": Model.load,
    "_load_collectives_neuron": _load_collectives,
    "_execute_neuron": Model.run,
    "_parallel_to_neuron": parallel_to,
    "_parallel_from_neuron": parallel_from,
    "_parallel_write_neuron": parallel_write,
    "_parallel_slice_neuron": parallel_slice,
    "_parallel_run_neuron": ParallelModel.run,
    "_parallel_executor_run": ParallelExecutor.run,
    "_profile_start_neuron": _no_profile,
    "_profile_stop_neuron": _no_profile,
    "_parallel_profile_start_neuron": _no_profile,
    "_parallel_profile_stop_neuron": _no_profile,
}
