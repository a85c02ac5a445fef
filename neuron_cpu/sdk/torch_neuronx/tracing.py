"""`torch_neuronx.trace`: a module for inputs of one form, as the compiler makes it.

Signature: AWS Neuron documentation, api-torch-neuronx-trace. A device gets a graph. Here the module
stays Python; one run on the example inputs traces and verifies its kernels. Python that reads
values therefore passes here, and a traced module has no file. The driver's estimate, which runs on
shapes alone, refuses such Python.
"""

from typing import Any, Callable, Optional, Sequence, Tuple, Union

import torch
from torch import nn

Inputs = Union[torch.Tensor, Tuple[torch.Tensor, ...]]


def trace(
    func: Callable[..., Any],
    example_inputs: Inputs,
    *_: Any,
    input_output_aliases: Optional[dict] = None,
    compiler_workdir: Optional[str] = None,
    compiler_args: Union[str, Sequence[str], None] = None,
    partitioner_config: Optional[Any] = None,
    inline_weights_to_neff: bool = True,
    cpu_backend: bool = False,
) -> nn.Module:
    """The module that runs `func` on inputs of the same shapes and types.

    Raises:
        NotImplementedError: inputs are to be aliases of outputs, or parts to run on the CPU.
        TypeError: an input is no tensor.
    """
    del compiler_workdir, compiler_args, inline_weights_to_neff, cpu_backend  # the compiler's
    if input_output_aliases or partitioner_config is not None:
        raise NotImplementedError(
            "torch_neuronx.trace of the stand-in keeps no state between calls and runs all of a "
            "module, expected neither input_output_aliases nor partitioner_config; leave them out."
        )
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    for at, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"Input {at} of torch_neuronx.trace is {type(tensor).__name__}, expected a tensor; "
                "pass other values by a wrapper around the module."
            )
    traced = _Traced(func, inputs)
    traced(*inputs)
    return traced


class _Traced(nn.Module):
    """Runs a module, on inputs of one form only."""

    def __init__(self, func: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._func = func
        self._form = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]

    def forward(self, *inputs: torch.Tensor) -> Any:
        form = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]
        if form != self._form:
            raise ValueError(
                f"The traced module takes inputs of {_words(self._form)}, got {_words(form)}; pad "
                "them, or trace it anew."
            )
        with torch.no_grad():
            return self._func(*inputs)


def _words(form: Sequence[Tuple[Tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{list(shape)} {str(dtype)[6:]}" for shape, dtype in form) or "nothing"
