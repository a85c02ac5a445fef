"""Makes a compiled graph of a module, as NxD's model builder asks for it.

Names, arguments and results: NxD, trace/model_builder.py (3aa65c6 to v2.27.0, 47f695c).
`neuron_cpu.runtime.tape` describes the stand-in's graph; HLO, NEFF and MetaNeff are its forms here.
"""

import inspect
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from neuron_cpu.closed import Closed
from neuron_cpu.errors import CompileError
from neuron_cpu.runtime import graph

from ..proto import metaneff_pb2
from .structure import Flattener, Packer

_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16),
    *(torch.int32, torch.int64, torch.bool, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
)
_GRAPHS: weakref.WeakValueDictionary[str, graph.Compiled] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(1)
_listeners: list[list[graph.Compiled]] = []


@dataclass
class HloArtifacts:
    """One traced graph.

    Attributes:
        weight_name_to_idx: place of each weight among the parameters of the graph. It holds the
            graph, whose name alone `hlo_module` carries.
    """

    hlo_module: Any
    flattener: Any
    packer: Any
    metaneff: Any
    weights: Any
    constant_parameter_tensors: Any
    weight_name_to_idx: dict[str, int]


@dataclass
class NeffArtifacts:
    """The place to which a compiled graph was written."""

    neff_filename: str


class _Places(dict[str, int]):
    """The places of a graph's weights, which follow ``before`` others. It holds the graph, as NxD's
    second model builder keeps this and the HLO alone."""

    def __init__(self, compiled: graph.Compiled, before: int) -> None:
        super().__init__((name, before + at) for at, name in enumerate(compiled.tape.weights))
        self.compiled = compiled


def generate_hlo(
    func: Any,
    example_inputs: Any,
    input_output_aliases: Mapping[Any, int] | None = None,
    *,
    treat_inputs_as_kwargs: bool = False,
    **_options: Any,
) -> HloArtifacts:
    """The graph of `func` for inputs with the shapes and types of `example_inputs`. A parameter in
    `input_output_aliases` is a state: after a call it holds the named output."""
    named = dict(example_inputs) if treat_inputs_as_kwargs else None
    alone = isinstance(example_inputs, torch.Tensor)
    inputs = [example_inputs] if alone else list(named.values() if named else example_inputs)
    names = list(named or _argument_names(func, len(inputs)))
    states = {id(key): place for key, place in (input_output_aliases or {}).items()}
    # The length of the new tokens, or of what they see: of ids and mask the longer one.
    bucket = max([1, *(int(tensor.shape[1]) for tensor in inputs[:2] if tensor.dim() == 2)])
    compiled = graph.compile_graph(func, named or inputs, states, "graph", bucket)
    module = graph.hlo_module(compiled.record)
    module.name = f"graph-{next(_NUMBERS)}"
    _GRAPHS[module.name] = compiled
    for listener in _listeners:
        listener.append(compiled)
    tape = compiled.tape
    kept = [place for place in range(len(compiled.outputs)) if place not in tape.aliases]
    return HloArtifacts(
        hlo_module=module,
        flattener=Flattener(range(len(inputs))),
        packer=Packer(kept),
        metaneff=_metaneff(compiled, names),
        weights=None,
        constant_parameter_tensors=None,
        weight_name_to_idx=_Places(compiled, len(inputs) + len(tape.states)),
    )


@contextmanager
def heard() -> Iterator[list[graph.Compiled]]:
    """Inside the block the list collects every graph that is traced."""
    graphs: list[graph.Compiled] = []
    _listeners.append(graphs)
    try:
        yield graphs
    finally:
        _listeners.remove(graphs)


def _argument_names(func: Any, count: int) -> list[str]:
    parameters = inspect.signature(getattr(func, "forward", func)).parameters
    return [*parameters, *(f"input{place}" for place in range(count))][:count]


def _metaneff(compiled: graph.Compiled, names: Sequence[str]) -> Any:
    """User inputs, states and weights in this order, and all outputs."""
    proto: Any = metaneff_pb2  # its classes are made of descriptors
    tape, kinds, made = compiled.tape, proto.MetaTensor.Type, proto.MetaNeff()
    rows: list[Any] = [
        (kinds.USER_INPUT, name, *form) for name, form in zip(names, tape.input_types)
    ]
    rows += [(kinds.INPUT_STATE, name, *tape.types[name]) for name in tape.states]
    rows += [(kinds.INPUT_WEIGHT, name, *tape.types[name]) for name in tape.weights]
    for place, (kind, name, shape, dtype) in enumerate(rows):
        row = made.input_tensors.add(name=f"input{place}".encode(), type=kind)
        row.shape[:], row.data_type = list(shape), _DTYPES.index(dtype)
        if kind == kinds.USER_INPUT:
            row.user_input_key = name.encode()
        else:
            row.checkpoint_key = name.encode()
    for place, (shape, dtype) in enumerate(compiled.outputs):
        row = made.output_tensors.add(name=f"output{place}".encode())
        row.shape[:], row.data_type = list(shape), _DTYPES.index(dtype)
    before = len(names)
    for place, name in tape.aliases.items():
        made.output_aliases_to[place] = before + list(tape.states).index(name)
    return made


def compiled_graph(name: str) -> graph.Compiled:
    """The graph whose HLO has this name; CompileError where another process traced it."""
    found = _GRAPHS.get(name)
    if found is None:
        raise CompileError(
            f"There is no graph {name!r} in this process, expected one that it has traced; a "
            "graph of the stand-in is compiled where it is traced."
        )
    return found


def generate_neff(
    hlo_artifacts: HloArtifacts,
    compiler_workdir: Any,
    compiler_args: Any = None,
    inline_weights_to_neff: bool = False,
) -> NeffArtifacts:
    """Compile into `compiler_workdir`: graph.neff, operators.json, and the graph twice. It is
    model/graph.hlo and, under SDK 2.27's name, hlo_module.pb."""
    del inline_weights_to_neff
    from libneuronxla import neuron_xla_compile  # which imports this module

    folder = Path(compiler_workdir)
    (folder / "model").mkdir(parents=True, exist_ok=True)
    content = hlo_artifacts.hlo_module.SerializeToString()
    for name in ("model/graph.hlo", "hlo_module.pb"):
        (folder / name).write_bytes(content)
    (folder / "graph.neff").write_bytes(neuron_xla_compile(content, compiler_args, work_dir=folder))
    return NeffArtifacts(str(folder / "graph.neff"))


def get_torch_dtype(data_type: int) -> torch.dtype:
    """The dtype of a MetaTensor's number."""
    return _DTYPES[data_type]


def __getattr__(name: str) -> Any:
    """Other names of the vendor's module, for imports only."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Closed(f"{__name__}.{name}")
