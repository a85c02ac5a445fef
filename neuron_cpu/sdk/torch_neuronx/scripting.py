"""The parts of TorchScript, and the runtime's classes in it, that NxD uses.

NxD scripts its containers of compiled graphs, saves them with torch.jit.save and runs them from
torch.jit.load. The runtime's classes are C++ there and Python here, which TorchScript does not
take. So `install` lets `torch.jit` leave NxD's modules as they are, and pickle them. Everything
else goes to TorchScript.
"""

import io
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from neuron_cpu import files
from neuron_cpu.closed import Closed
from neuron_cpu.errors import StandInError

from .spmd import SPMDModel
from .tracing import READERS

_MAGIC = b"neuron_cpu model 2\n"
_HOST = "privateuseone"  # the runtime's device: memory of a rank


class _Runtime(SimpleNamespace):
    """What NxD uses, and for Transformers NeuronX a table of `neuron_cpu.hlo.memory`."""

    def __init__(self, table: str, **names: Any) -> None:
        super().__init__(_table=table, **names)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            from neuron_cpu.hlo import memory

            table = getattr(memory, self._table)
            if name in table:
                return table[name]
        raise AttributeError(f"torch's namespace neuron has no {name!r}")


def _no_transport(*_: Any) -> Any:
    """What aws-neuron/upstreaming-to-vllm calls (01e1d7f, neuron_transfer_engine.py)."""
    raise StandInError(
        "NeuronTransferEngine sends caches from device to device and is closed, expected caches "
        "to stay in a process; send the tensors of model.traced_model.nxd_model.state with "
        "torch.distributed."
    )


def install() -> None:
    """Register the runtime's classes and operators, once a process."""
    if isinstance(torch.classes.__dict__.get("neuron"), SimpleNamespace):
        return
    closed = Closed("torch.classes.neuron.LayoutTransformation")  # no layout is ever proposed
    torch.classes.neuron = _Runtime(  # type: ignore[attr-defined]
        "CLASSES",
        SPMDModel=SPMDModel,
        LayoutTransformation=closed,
        NeuronTransferEngine=_no_transport,
        Runtime=lambda: SimpleNamespace(unsafe_close=lambda: None),  # no device is held
    )
    operators = _Runtime("OPERATORS", _parallel_load=lambda checkpoint: checkpoint)
    torch.ops.neuron = operators  # type: ignore[attr-defined]
    originals = {name: getattr(torch.jit, name) for name in ("script", "trace", "save")}

    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        return _kept(obj) if _is_nxds(obj) else originals["script"](obj, *args, **kwargs)

    def trace(func: Any, *args: Any, **kwargs: Any) -> Any:
        return _kept(func) if _is_nxds(func) else originals["trace"](func, *args, **kwargs)

    def save(model: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, Loaded):
            model = model.executor
        if not _is_nxds(model):
            return originals["save"](model, file, *args, **kwargs)
        pickled = io.BytesIO()
        _Pickler(pickled).dump(model)
        content = files.sealed(_MAGIC, pickled.getvalue())
        if hasattr(file, "write"):
            file.write(content)
        else:
            with open(file, "wb") as opened:
                opened.write(content)
        return None

    for own in (script, trace, save):
        setattr(torch.jit, own.__name__, own)
    READERS[_MAGIC] = lambda content, *_: Loaded(pickle.loads(content))


def _is_nxds(obj: Any) -> bool:
    kind = type(obj)
    return isinstance(obj, nn.Module) and kind.__module__.split(".")[0] == "neuronx_distributed"


def _kept(module: nn.Module) -> nn.Module:
    """The module, with the attributes that a scripted one has."""
    part: Any
    for part in module.modules():
        part.original_name = type(part).__name__
        shapes = part.__dict__.get("input_shape_map")
        if isinstance(shapes, dict):
            part.input_shape_map = _Shapes(shapes)
    return module if type(module).__name__ != "StateInitializer" else _OnHost(module)


class _Shapes(dict):
    """A dict by shape: TorchScript prints shapes as keys, Python calls them torch.Size."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(_printed(key))

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(_printed(key))


def _printed(shapes: object) -> str:
    return str(shapes).replace("torch.Size(", "").replace(")", "")


class _OnHost(nn.Module):
    """Runs a module whose tensors belong into a rank's memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        with _HostMemory():
            made = self.module(*inputs)
        # NxD 0.16 makes them once and copies them to each rank, which are one memory here.
        return [{name: tensor.clone() for name, tensor in own.items()} for own in made]


class _HostMemory(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith(_HOST):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


class Loaded(nn.Module):
    """torch.jit.load's result for a model of NxD: its executor, which passes for a script."""

    def __init__(self, executor: nn.Module) -> None:
        super().__init__()
        self.executor = executor

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # type: ignore[override]
        """ScriptModule: NxDI takes anything else for a model on the CPU."""
        return torch.jit.ScriptModule

    @property
    def nxd_model(self) -> Any:
        return self.executor.nxd_model

    def forward(self, *inputs: Any) -> Any:
        return self.executor(*inputs)

    def graphs(self) -> dict[str, list[SPMDModel]]:
        """Each sub-model's compiled graphs, one a bucket."""
        return {name: _graphs(part) for name, part in self.nxd_model.models.items()}


def _graphs(part: Any) -> list[SPMDModel]:
    """The graphs of one sub-model's executor; NxD 0.10 to 0.14 keep them one level deeper."""
    return list(getattr(part, "bucket_model_executor", part).models)


class _Pickler(pickle.Pickler):
    """Pickles the scripted functions that choose buckets as TorchScript files."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (torch.jit.ScriptFunction, torch.jit.RecursiveScriptModule)):
            buffer = io.BytesIO()
            torch.jit.save(obj, buffer)
            return _unscripted, (buffer.getvalue(),)
        return NotImplemented


def _unscripted(content: bytes) -> Any:
    return torch.jit.load(io.BytesIO(content))
