"""Compiles an HLO module for the CPU with XLA and runs it, one replica a rank.

The ranks are devices of one client, so that XLA's own collectives join them.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch_neuronx.pyhlo import hlo_pb2
from torch_neuronx.pyhlo.scribe import TORCH
from torch_neuronx.pyhlo.xla_data_pb2 import PrimitiveType

from .. import files
from ..errors import CompileError
from . import calls

MAGIC = b"neuron_cpu hlo 2\n"
_BELOW = (0, 8)  # jaxlib, whose later clients take other arguments
_ALIGNMENT = 64  # bytes, of what XLA reads without a copy


@functools.cache
def xla_client() -> Any:
    """jaxlib's module, or the sentence that says how to get it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # no lines about devices
    try:
        from jaxlib import __version__, xla_client
    except ImportError:
        raise ImportError(
            "jaxlib is not installed, and XLA's compiler for CPUs in it runs graphs of PyHLO; "
            "pip install -r requirements-hlo.txt."
        ) from None
    if tuple(map(int, __version__.split(".")[:2])) >= _BELOW:
        raise ImportError(
            f"jaxlib {__version__} is installed, expected 0.7.2, as later clients of XLA take no "
            "graphs of PyHLO; pip install -r requirements-hlo.txt."
        )
    return xla_client


@functools.cache
def _client(ranks: int) -> Any:
    return xla_client().make_cpu_client(num_devices=ranks)


def to_neff(module_bytes: bytes) -> bytes:
    """The file of a compiled graph: the module with its kernels, checked as far as no number of
    ranks is needed.

    Raises:
        CompileError: a custom call that nobody knows, or a graph that XLA refuses.
    """
    module = hlo_pb2.HloModuleProto.FromString(module_bytes)
    calls.put_kernels(module)
    file = packed(module)
    _stablehlo(module)
    return file


def packed(module: Any) -> bytes:
    """The file of a module."""
    return files.sealed(MAGIC, module.SerializeToString())


def module_of(neff: bytes) -> Any:
    """The HloModuleProto in the file of a compiled graph.

    Raises:
        CompileError: the file is none of ours, is damaged or cut short.
    """
    try:
        return hlo_pb2.HloModuleProto.FromString(files.unsealed(MAGIC, neff))
    except ValueError:
        raise CompileError(
            f"A compiled graph of {len(neff)} bytes is not one of this neuron_cpu, is damaged or "
            "cut short, expected what `compile` or `save` wrote here; compile the model again."
        ) from None


def _stablehlo(module: Any) -> tuple[str, list[Any]]:
    """A graph in MLIR, and what it calls back. The module is changed."""
    client = xla_client()
    with _refusals(module.name):
        callbacks = calls.expand(module)
        module.ClearField("input_output_alias")  # the caller writes outputs where they belong
        computation = client.XlaComputation(module.SerializeToString())
        return client._xla.mlir.xla_computation_to_mlir_module(computation), callbacks


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """XLA's errors as one sentence."""
    try:
        yield
    except xla_client().XlaRuntimeError as error:
        raise CompileError(
            f"XLA's compiler for CPUs refuses the graph {name}: {str(error).splitlines()[0]}; "
            "write it with operators that XLA has on CPUs."
        ) from None
    except (LookupError, ValueError) as error:
        raise CompileError(
            f"The graph {name} has an operand or a configuration that says nothing "
            f"({type(error).__name__}: {error}), expected what PyHLO writes; write it anew."
        ) from None


class Executable:
    """A compiled graph, loaded for some ranks."""

    def __init__(self, neff: bytes, ranks: int) -> None:
        module = module_of(neff)
        self._parameters = module.host_program_shape.parameters
        text, callbacks = _stablehlo(module)
        client, xla = _client(ranks), xla_client()
        self._devices = client.devices()
        options = xla.CompileOptions()
        options.num_replicas = ranks
        replicas = np.arange(ranks, dtype=np.int32).reshape(ranks, 1)
        options.device_assignment = xla.DeviceAssignment.create(replicas)
        with _refusals(module.name):
            devices = xla.DeviceList(tuple(self._devices))
            self._loaded = client.compile_and_load(text, devices, options, callbacks)

    def __call__(self, inputs: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Outputs by number and rank, of inputs by number and rank."""
        placed = [
            [_place(tensor, shape, device) for tensor, device in zip(ranks, self._devices)]
            for ranks, shape in zip(inputs, self._parameters)
        ]
        results = self._loaded.execute_sharded(placed).disassemble_into_single_device_arrays()
        return [[_back(array) for array in ranks] for ranks in results]


def _place(tensor: torch.Tensor, shape: Any, device: Any) -> Any:
    """A parameter on a device; memory that lies as XLA needs it is not copied."""
    kind, sizes = TORCH[PrimitiveType(shape.element_type)], tuple(shape.dimensions)
    tensor = tensor.detach().contiguous()
    if tensor.shape != sizes:  # a smaller bucket reads the first part of a buffer
        tensor = tensor.flatten()[: math.prod(sizes)].view(sizes)
    if tensor.dtype != kind:
        tensor = tensor.view(kind)
    if tensor.data_ptr() % _ALIGNMENT:
        tensor = tensor.clone()
    return xla_client()._xla.dlpack_managed_tensor_to_buffer(tensor.__dlpack__(), device, None)


def _back(array: Any) -> torch.Tensor:
    return torch.from_dlpack(xla_client()._xla.buffer_to_dlpack_managed_tensor(array, stream=None))
