"""Traces one sub-model and bucket on the meta device, as the compiler would see it.

The model's forward runs once with shapes only. Every matrix product of PyTorch and every kernel
call is recorded with the module that issued it. Python that depends on the value of an input or a
weight is refused with its line, because it cannot become part of a graph. Tensors that depend on
neither (ranges, literals, buffers) are constants: they are computed, and Python may look at them,
as it may on the device, where the baseline's rotary scaling does.
"""

import base64
import itertools
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from neuron_cpu.core import observe_kernel_calls
from neuron_cpu.core.device.errors import within
from neuron_cpu.errors import CompileError

from . import ranks
from .collectives import Collective
from .recording import (
    COLLECTIVE,
    KERNEL,
    TORCH,
    Dot,
    Event,
    GraphRecord,
    TensorShape,
    shapes_of,
    sizes,
    storage_of,
)
from .refused import refusal
from .tape import Capture, Tape, tensors_of

KERNEL_TARGET = "AwsNeuronCustomNativeKernel"
# The compiler refuses graphs above 5,000,000 of its instructions (error NCC_EBVF030 of its list of
# errors), and a traced one can become several.
MOST_INSTRUCTIONS = 1_000_000
_TORCH_ROOT = os.path.dirname(torch.__file__)

# Operators whose result depends on values in its shape or leaves the device.
_DATA_DEPENDENT = {
    "_local_scalar_dense": "reads a tensor's value (.item(), bool(), int() or a Python `if` on it)",
    "nonzero": "makes a shape from tensor values (nonzero or a boolean index)",
    "masked_select": "makes a shape from tensor values (masked_select)",
    "_unique2": "makes a shape from tensor values (unique)",
    "unique_dim": "makes a shape from tensor values (unique)",
    "equal": "compares tensor values in Python (torch.equal)",
}

CACHES = "past_key_values"  # in the names of parameters that are no weights, as NxD looks for them
# NxD's and NxD Inference's own graphs have these and run on devices: routers in float64, and an
# argsort of sequence ids.
TAKEN = ("[NCC_ESPP004]", "[NCC_EVRF029]")

_META, _CPU = torch.device("meta"), torch.device("cpu")


def _as_meta(value: Any) -> Any:
    """The shape of a tensor; other values unchanged."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator changes in place."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_of(value)
    return found


def _model_line() -> str:
    """file:line of the innermost frame that is neither PyTorch's nor this module's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_TORCH_ROOT) and path != __file__:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def _asked_by_library() -> bool:
    """Whether a line of NxD or NxDI asks for a value. A trace of torch_xla then computes the
    example's, and the graph keeps it: NxDI's Medusa and its trees of tokens rely on that, as their
    example's first position is 0 (model_base.py of v0.6.10598, lines 450 and 600)."""
    packages = {"neuronx_distributed", "neuronx_distributed_inference"}
    return not packages.isdisjoint(_model_line().split(os.sep))


def hlo_module(record: GraphRecord) -> Any:
    """The HloModuleProto of a graph: its products, and its kernel calls with their names and MAC
    counts where the device's compiler leaves them.

    Elementwise operators are left out, because nobody reads them from the file: the driver counts
    products and custom calls, as it does in a file of the device compiler.
    """
    from torch_neuronx.pyhlo.scribe import TORCH as TYPES  # protobuf, which a kernel does without
    from torch_neuronx.pyhlo.scribe import HloScribe

    numbers = {dtype: number for number, dtype in TYPES.items()}
    places = itertools.count()

    def main(scribe: HloScribe) -> Any:
        def shape(tensor: TensorShape) -> Any:
            return scribe.of_type(numbers.get(tensor.dtype, numbers[torch.float32]))[tensor.shape]

        for event in record.events:
            if event.kind != KERNEL and not event.is_product:
                continue
            given = [shape(t).Parameter(parameter_number=next(places)) for t in event.factors]
            made = shape(event.outputs[0])
            if event.kind == KERNEL:
                config = {"func_name": event.name, "mac_count": event.macs}
                encoded = base64.b64encode(json.dumps(config).encode())
                made.CustomCall(*given, custom_call_target=KERNEL_TARGET, backend_config=encoded)
            else:
                made.Dot(*given, dot_dimension_numbers=_numbers_of(event))
        return scribe.tuple().Tuple()

    module = HloScribe()(main).module_proto
    module.ClearField("host_program_shape")  # of graphs with all their operators, which XLA runs
    sizes = [record.bucket] if isinstance(record.bucket, int) else record.bucket
    module.name = "_".join([record.tag, *map(str, sizes)])
    return module


def _numbers_of(product: Event) -> dict[str, Sequence[int]]:
    """The dimension numbers of a matrix product."""
    dot = Dot.of(product.name, [tensor.shape for tensor in product.inputs])
    assert dot is not None
    return {
        "lhs_contracting_dimensions": dot.lhs_contracting,
        "rhs_contracting_dimensions": dot.rhs_contracting,
        "lhs_batch_dimensions": dot.batch,
        "rhs_batch_dimensions": dot.batch,
    }


class GraphRecorder(TorchDispatchMode):
    """Records a forward operator by operator, and builds its graph.

    A tensor is *traced* if it depends on an input or a weight; those are on the meta device. All
    others are constants on the CPU. An operator with a traced argument gets shapes for all of its
    arguments, so a constant may meet an input without either device being asked for.

    Attributes:
        record: the events so far.
        capture: what writes the graph that can be run; None where nobody runs it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to import PyTorch's compiler takes a second

    def __init__(self, tag: str, bucket: Any, capture: Capture | None = None) -> None:
        super().__init__()
        self.record = GraphRecord(tag, bucket)
        self.capture = capture
        self._path: list[str] = []
        # A constant that received a traced value is none any more, nor are its views: storages.
        self._tainted: dict[int, torch.Tensor] = {}
        self._inside_collective = False
        self._weights: set[int] = set()  # their storages

    def watch(self, model: nn.Module) -> list[Any]:
        """Follow which module runs; returns the hook handles to remove afterwards."""
        self._weights = {
            storage_of(each) for name, each in model.named_parameters() if CACHES not in name
        }
        handles = []
        for path, module in model.named_modules():
            handles.append(
                module.register_forward_pre_hook(lambda *_, path=path: self._path.append(path))
            )
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        return handles

    def _leave(self, *_: Any) -> None:
        self._path.pop()

    def _note(
        self,
        kind: str,
        name: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        macs: int = 0,
        program: Any = None,
    ) -> None:
        self.record.events.append(
            Event(
                self._where,
                kind,
                name,
                shapes_of(inputs, self._weights),
                shapes_of(outputs),
                macs,
                program,
            )
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        kwargs = dict(kwargs or {})
        tensors = tensors_of((args, kwargs))
        # what depends on inputs or weights: a shape, or a constant written to
        traced = any(one.is_meta or storage_of(one) in self._tainted for one in tensors)
        # Random numbers are drawn anew by every call of a graph that is run.
        capture = None if self._inside_collective else self.capture
        draws = capture is not None and torch.Tag.nondeterministic_seeded in func.tags
        # The model sees no meta device; who asks for it is a kernel call on shapes.
        traced = traced or draws or kwargs.get("device") == _META
        if traced and name in _DATA_DEPENDENT:
            if name == "_local_scalar_dense" and capture is not None and _asked_by_library():
                example = capture.example(args[0])
                if example is not None:
                    return example.item()
            raise CompileError(
                f"{_model_line()} {_DATA_DEPENDENT[name]}, expected a forward that only shapes "
                "steer, as it is traced once for every input; use torch.where or masks instead."
            )
        # One device for all: what depends on an input follows it, constants stay constants.
        if kwargs.get("device") is not None:
            kwargs["device"] = _META if traced else _CPU
        if traced:
            # A constant that is written loses its values before the write: reading them later
            # would give what stood there before.
            written = _written(func, args, kwargs)
            for tensor in written:
                self._taint(tensor)
            if capture is not None:
                captured = capture.refs((args, kwargs))
            if not all(tensor.is_meta for tensor in tensors):
                args, kwargs = tree_map(_as_meta, (args, kwargs))
        elif capture is not None:
            for tensor in _written(func, args, kwargs):
                capture.forget(tensor)
        result = func(*args, **kwargs)
        if traced:
            told = refusal(name, args, kwargs, tensors, tensors_of(result), fp8=False)
            if told is not None and not told.startswith(TAKEN):
                raise CompileError(f"{_model_line()} neuronx-cc refuses: {told}.")
        if traced and capture is not None:
            capture.node(func.name(), captured, result, writes=bool(written), draws=draws)
        if not self._inside_collective:
            dot = Dot.of(name, [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)])
            macs = 0 if dot is None else dot.macs
            self._note(TORCH, name, tensors, tensors_of(result), macs)
        return result

    @property
    def _where(self) -> str:
        return self._path[-1] if self._path else ""

    def _taint(self, tensor: torch.Tensor) -> None:
        """A constant gets values that depend on inputs."""
        if not tensor.is_meta:
            self._tainted[storage_of(tensor)] = tensor
            if self.capture is not None:
                self.capture.becomes_traced(tensor)

    def on_kernel(self, call: Any) -> None:
        """Callback of `observe_kernel_calls`: one top-level kernel call."""
        macs = int(call.program.macs)
        # A result depends on inputs as they do: it has a shape and no values.
        call.outputs[:] = [_as_meta(tensor) for tensor in call.outputs]
        if self.capture is not None:
            written = [t for s, t in zip(call.program.inputs, call.inputs) if s.mutable]
            for tensor in written:
                self._taint(tensor)
            arguments = self.capture.refs(call.arguments)
            self.capture.node(call.kernel, arguments, call.outputs, writes=bool(written))
        self._note(KERNEL, call.name, call.inputs, call.outputs, macs, call.program)

    def collective(self, call: Collective, tensor: torch.Tensor) -> torch.Tensor:
        """One collective; returns its results on shapes."""
        given = _as_meta(tensor)
        with within(self, _inside_collective=True):
            result = call.results([given] * call.size())[0]
        if self.capture is not None:
            self.capture.node(call, self.capture.refs(((tensor,), {})), result)
        self._note(COLLECTIVE, call.kind, [given], [result])
        return result


# How PyTorch complains when a meta tensor's values are asked for.
_VALUE_NEEDED = re.compile(r"(?<![a-z])meta(?![a-z])|unallocated storage")


# PyTorch's getter of `tensor.device`, as a function mode meets it.
_GET_DEVICE = torch.Tensor.device.__get__


class _DeviceOfConstants(TorchFunctionMode):
    """Python of the model sees one device, the CPU, on which its constants are.

    `torch.tensor(..., device=meta)` would lose its values before the recorder sees it, and Hugging
    Face's rotary embeddings hand `x.device.type` to torch.autocast, which knows no meta device.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor):
            kwargs.pop("device", None)
        if func in (torch.where, torch.Tensor.where) and len(args) == 3:
            # Not the dtype of a condition counts for torch_xla, but whether it is zero.
            place = 0 if func is torch.where else 1
            args = tuple(
                a != 0 if k == place and a.dtype != torch.bool else a for k, a in enumerate(args)
            )
        result = func(*args, **kwargs)
        return _CPU if func == _GET_DEVICE and result == _META else result


def _explain(error: Exception, tag: str, bucket: Any) -> Exception:
    """A meta-device complaint of PyTorch as a sentence about the model's line; others unchanged."""
    text = str(error)
    if not _VALUE_NEEDED.search(text.lower()):
        return error
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_TORCH_ROOT) and frame.filename != __file__
    ]
    return CompileError(
        f"{lines[-1] if lines else 'The model'} needs the values of a tensor while {tag} (bucket "
        f"{bucket}) is traced ({text.splitlines()[0]}), expected a forward that only shapes "
        "steer and that makes its tensors on the device of its inputs; compute with tensors."
    )


def trace(model: nn.Module, inputs: Sequence[torch.Tensor], tag: str, bucket: Any) -> GraphRecord:
    """Run `model` on the shapes of `inputs`; returns the record.

    Inputs and weights are on the meta device: no values, no memory. CompileError names the model's
    line where Python depends on a value; a kernel's refusal passes through.
    """
    # Weights and inputs as shapes: a full-size model is traced in no memory, and whatever asks for
    # a value raises in the line that asks.
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    model.to(_META)
    for module, own in buffers:  # they keep their values, as constants
        module._buffers.update(own)
    recorder = GraphRecorder(tag, bucket)
    _run_traced(model, recorder, [_as_meta(tensor) for tensor in inputs])
    _check_size(recorder.record, inputs[0].shape[1] if inputs[0].dim() > 1 else 1)
    return recorder.record


def _run_traced(model: nn.Module, recorder: GraphRecorder, inputs: Any) -> Any:
    """The model's results on shapes; `inputs` by position, or by name in a dictionary."""
    handles = recorder.watch(model)
    args, kwargs = ([], inputs) if isinstance(inputs, dict) else (inputs, {})
    # Kernels are traced and verified by their own call, on shapes as well, and collectives meet
    # nobody; the recorder is told of both, as neither passes through PyTorch's dispatch.
    kernels = observe_kernel_calls(recorder.on_kernel)
    current = within(_CURRENT, recorder=recorder)
    try:
        with torch.no_grad(), ranks.tracing(), _DeviceOfConstants(), recorder, kernels, current:
            return model(*args, **kwargs)
    except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
        explained = _explain(error, recorder.record.tag, recorder.record.bucket)
        if explained is error:
            raise
        raise explained from error
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Compiled:
    """A graph of the real library, as its builder gets it.

    Attributes:
        tape: what ranks run.
        record: what the driver's tables and estimates read.
        outputs: shapes and dtypes of what the forward returned, flat.
    """

    tape: Tape
    record: GraphRecord
    outputs: list[tuple[tuple[int, ...], torch.dtype]]


def compile_graph(
    model: nn.Module, inputs: Any, states: dict[int, int], tag: str, bucket: Any
) -> Compiled:
    """Run `model` on the shapes of `inputs` and record a graph that ranks can run.

    `inputs` are tensors in order, or by name in a dictionary; `states` has, by a parameter's id,
    the position of the output that replaces the parameter. Parameters keep their values. Raises
    what `trace` raises.
    """
    capture = Capture()
    recorder, tape = GraphRecorder(tag, bucket, capture), capture.tape
    aliases: dict[int, str] = {}
    named = inputs if isinstance(inputs, dict) else dict(enumerate(inputs))
    metas = {name: _as_meta(tensor) for name, tensor in named.items()}
    for name, tensor in metas.items():
        tape.inputs.append(capture.new(tensor))
        capture.examples[tape.inputs[-1]] = named[name]
        tape.input_types.append((tuple(tensor.shape), tensor.dtype))
    with _parameters_as_shapes(model) as parameters:
        for name, (parameter, meta) in parameters.items():
            number = capture.new(meta)
            place = states.get(id(parameter))
            if place is not None:
                aliases[place] = name
            (tape.weights if place is None else tape.states)[name] = number
            tape.types[name] = tuple(meta.shape), meta.dtype
        given = metas if isinstance(inputs, dict) else list(metas.values())
        made = _run_traced(model, recorder, given)
    first = next(iter(named.values()))
    _check_size(recorder.record, first.shape[1] if first.dim() > 1 else 1)
    shapes = [(tuple(t.shape), t.dtype) for t in tensors_of(made)]
    return Compiled(capture.finish(made, aliases), recorder.record, shapes)


@contextmanager
def _parameters_as_shapes(model: nn.Module) -> Iterator[dict[str, tuple[Any, Any]]]:
    """Inside the block parameters have shapes only; yields name -> the parameter, and its shape.

    A parameter in several places has one name, its first. Buffers stay: they are constants.
    """
    own: list[tuple[nn.Module, str, Any]] = []
    found: dict[int, Any] = {}
    named: dict[str, tuple[Any, Any]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            own.append((module, name, parameter))
            if id(parameter) not in found:
                meta = nn.Parameter(_as_meta(parameter.data), requires_grad=False)
                meta.__dict__.update(parameter.__dict__)
                found[id(parameter)] = meta
                named[f"{path}.{name}" if path else name] = parameter, meta
    try:
        for module, name, parameter in own:
            module._parameters[name] = found[id(parameter)]
        yield named
    finally:
        for module, name, parameter in own:
            module._parameters[name] = parameter


_CURRENT = threading.local()


def collective(
    call: Collective, tensor: torch.Tensor, group: ranks.Group | None = None
) -> torch.Tensor:
    """One collective, in a graph that is traced or on a rank; of the thread's group by default."""
    recorder = getattr(_CURRENT, "recorder", None)
    return call(tensor, group) if recorder is None else recorder.collective(call, tensor)


def _check_size(record: GraphRecord, tokens: int) -> None:
    """Refuse a graph that is too large to compile; `tokens` a row are in one call of it.

    A fifth of the limit is left for work that does not shrink with the tokens (one pass over
    weights).
    """
    count = record.instructions
    if count <= MOST_INSTRUCTIONS:
        return
    fitting = tokens * MOST_INSTRUCTIONS * 4 // (5 * count)
    fitting -= fitting % 64 if fitting >= 64 else 0
    mend = "choose shorter buckets"
    if tokens > 1:
        name, how = "speculation_length", "in such chunks"
        if tokens == sizes(record.bucket)[0]:
            name, how = "max_context_length", "in chunks behind it"
        mend = f"choose a {name} of {fitting}, and feed longer prompts {how}"
    raise CompileError(
        f"{record.tag}, bucket {record.bucket}, has {count:,} traced instructions in its kernels, "
        f"expected at most {MOST_INSTRUCTIONS:,}, because the compiler refuses graphs of "
        f"5,000,000 of its own; {mend}."
    )
