"""NKI kernels on tensors of the device, called from Python and from compiled graphs.

Sources: AWS Neuron documentation, "How to work with NKI" of TorchNeuron, and the programs of
docs/torch_device.md. A kernel runs on the host's memory of its arguments, as a direct call on CPU
tensors does. While a graph is compiled its arguments have no values: the kernel is traced once for
the signature, and its Program says what the results are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from neuron_cpu.core.device.errors import warn
from neuron_cpu.core.language import gradients
from neuron_cpu.core.language import kernel as calling
from neuron_cpu.core.language.kernel import Kernel, KernelCall
from neuron_cpu.core.language.specialisation import line_of, rebuilt

from .group import ranked
from .state import STATE
from .tensor import NeuronTensor, wrapped

WRITES = (
    "a device with TorchNeuron lost all of three such writes in one compiled graph, and kept those "
    "of kernels that return the tensor"
)


def call(kernel: Kernel, args: tuple, kwargs: dict) -> Any:
    """A kernel's call from Python, whatever its tensors are."""
    tensors: list[torch.Tensor] = []
    mapped(tensors.append, args, kwargs)
    kinds = {type(one) for one in tensors}
    if FakeTensor in kinds:
        return _shapes(kernel, tensors, args, kwargs)
    if NeuronTensor not in kinds and not any(isinstance(one, NeuronTensor) for one in tensors):
        return kernel.here(args, kwargs)
    return _on_device(kernel, tensors, args, kwargs)


def mapped(make: Callable[[Any], Any], args: Any, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with every tensor replaced by `make(tensor)`."""

    def one(value: Any, _: str) -> Any:
        return make(value)

    named = {name: rebuilt(value, one) for name, value in sorted(kwargs.items())}
    return tuple(rebuilt(value, one) for value in args), named


def _on_device(kernel: Kernel, tensors: list[torch.Tensor], args: tuple, kwargs: dict) -> Any:
    device = next(one.device for one in tensors if isinstance(one, NeuronTensor))
    for one in tensors:
        if getattr(one, "device", None) != device:
            raise RuntimeError(
                f"kernel {kernel.name} is called with a tensor on {getattr(one, 'device', 'cpu')} "
                f"beside one on {device}, expected all of its tensors on {device}; move it with "
                f".to('{device}')."
            )
    own_tensors = {id(one.host): one for one in tensors if isinstance(one, NeuronTensor)}
    on_host = mapped(lambda one: one.host, args, kwargs)
    after = None if STATE.before_kernel is None else STATE.before_kernel(*on_host)
    calls: list[KernelCall] = []
    with torch.no_grad(), ranked(), calling.observe_kernel_calls(calls.append):
        result = kernel.on_host(*on_host[0], **on_host[1])
    STATE.executed.add(f"nki::{kernel.name}")
    for storage, one in zip(calls[-1].program.inputs, tensors):
        if storage.mutable:
            torch.autograd.graph.increment_version(one)
    if after is not None:
        after(calls[-1])

    def on_device(host: torch.Tensor, _: str) -> torch.Tensor:
        given = own_tensors.get(id(host))
        return wrapped(host, device) if given is None else given

    return gradients.told(kernel.name, tensors, rebuilt(result, on_device))


# --- while a graph is compiled --------------------------------------------------------------------
def _shapes(kernel: Kernel, tensors: list[Any], args: tuple, kwargs: dict) -> Any:
    """Results without values: the kernel is traced for the shapes of its arguments."""
    first = next(one for one in tensors if isinstance(one, FakeTensor))
    made: dict[int, Any] = {}  # what stands for a tensor while the kernel is traced

    def stand(one: Any) -> torch.Tensor:
        sizes = [int(size) for size in one.shape]
        made[id(one)] = torch.empty(sizes, dtype=one.dtype, device="meta")
        return made[id(one)]

    calls: list[KernelCall] = []
    with unset_fake_temporarily(), torch.no_grad(), ranked():
        on_meta = mapped(stand, args, kwargs)
        with calling.observe_kernel_calls(calls.append):
            result = kernel.on_host(*on_meta[0], **on_meta[1])
    program = calls[-1].program
    for storage in program.inputs:  # a compiled graph may lose what the kernel writes and keeps
        if storage.mutable and storage not in program.outputs:
            warn(
                "sim_write_not_returned",
                f"kernel {kernel.name} writes its argument {storage.name} in a compiled graph and "
                f"does not return it, expected it among the results: {WRITES}; return it, and use "
                "the returned tensor",
                line_of(kernel.function),
            )
    by_storage = {storage: one for storage, one in zip(program.inputs, tensors)}
    outputs = iter(program.outputs)

    def fake(one: torch.Tensor, _: str) -> Any:
        given = by_storage.get(next(outputs))
        if given is not None:
            return given
        with first.fake_mode:
            return torch.empty(one.shape, dtype=one.dtype, device=first.device)

    return rebuilt(result, fake)


calling.called_by(call)
