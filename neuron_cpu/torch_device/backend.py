"""`torch.compile(backend="neuron")`: the graph that Dynamo captures, for one signature.

Sources: AWS Neuron documentation, reference of torch.compile and of environment variables in
TorchNeuron. A device compiles the graph; here its operators run one by one, each time it is called
with that signature. Autograd, views and writes are those of eager PyTorch for that reason.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from . import dynamo
from .state import LOGGER, STATE

NO_COPIES = "TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY"
RETAIN = "TORCH_NEURONX_RETAIN_DEVICE_MODE"
NAMES = ("neuron", "neuron_libtorch", "neuron_native_lite")  # the last two are Lite's
_NUMBERS = itertools.count(1)

dynamo.teach()


def compiled(
    graph: fx.GraphModule, inputs: list[Any], mode: Any = None, options: Any = None, **_: Any
) -> Callable[..., Any]:
    """What runs a captured graph.

    Raises:
        RuntimeError: a size is no constant, or an input is on the CPU and copies are forbidden.
    """
    if mode not in (None, "default"):
        LOGGER.warning("mode='%s' is none of neuron's, which compiles with mode='default'.", mode)
    _check_static(graph, inputs)
    STATE.compiled["graphs"] = STATE.compiled.get("graphs", 0) + 1
    name = (options or {}).get("model_name") or f"graph {next(_NUMBERS)}"
    places = [one.device.type for one in inputs if isinstance(one, torch.Tensor)]
    if "neuron" not in places:  # a model of the host: all that it makes is the device's
        _move(graph)
    _check_placed(inputs)
    run = graph.forward

    def call(*given: Any) -> Any:
        moved = [_on_device(one) for one in given]
        region = STATE.region(name, graph)
        if "neuron" in places:
            with region:
                return run(*moved)
        with region, STATE.device():
            out = run(*moved)
        return _back(out) if os.environ.get(RETAIN) == "1" else out

    return call


def register() -> None:
    """Enter the backend under its name, where no entry point has done so."""
    from torch._dynamo.backends import registry

    for name in NAMES:
        if name not in registry._COMPILER_FNS:
            registry.register_backend(compiled, name=name)


def _check_static(graph: fx.GraphModule, inputs: list[Any]) -> None:
    symbols = {
        str(size)
        for one in inputs
        for size in (one.shape if isinstance(one, torch.Tensor) else (one,))
        if isinstance(size, torch.SymInt)
    }
    if symbols:
        raise RuntimeError(
            f"Dynamic shapes detected in {len(symbols)} sizes ({', '.join(sorted(symbols))}), "
            "expected constants, because backend 'neuron' requires static shapes; compile with "
            "dynamic=False, which compiles each new shape, or pad the inputs to one shape."
        )


def _check_placed(inputs: list[Any]) -> None:
    if os.environ.get(NO_COPIES) != "1":
        return
    for at, one in enumerate(inputs):
        if isinstance(one, torch.Tensor) and one.device.type == "cpu":
            raise RuntimeError(
                f"Input {at} of the graph is on cpu, expected neuron, because {NO_COPIES}=1 "
                "forbids copies; move it with .to('neuron')."
            )


def _on_device(value: Any) -> Any:
    on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return value.to(STATE.device()) if on_cpu else value


def _back(out: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda one: one.cpu(), out)


def _move(graph: fx.GraphModule) -> None:
    """Let a graph of the host make its tensors on the device."""
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(graph, node.target, None), torch.Tensor):
            setattr(graph, node.target, _on_device(getattr(graph, node.target)))
        device = node.kwargs.get("device")
        if device is not None and torch.device(device).type == "cpu":
            node.kwargs = {**node.kwargs, "device": STATE.device()}
    graph.recompile()
