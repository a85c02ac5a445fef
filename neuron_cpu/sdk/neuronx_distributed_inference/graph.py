"""Tracing one sub-model and bucket on the meta device: what the compiler would see of it.

The model's forward runs once with shapes only. Every matrix product of PyTorch and every kernel
call is recorded with the module that issued it. Python that depends on the value of an input or a
weight is refused with its line, because it cannot become part of a graph. Tensors that depend on
neither (ranges, literals, buffers) are constants: they are computed, and Python may look at them,
as it may on the device, where the baseline's rotary scaling does.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import traceback
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from neuronx_distributed.parallel_layers import parallel_state
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch_neuronx.pyhlo import hlo_pb2

from neuron_cpu.core import observe_kernel_calls
from neuron_cpu.errors import CompileError

KERNEL_TARGET = "AwsNeuronCustomNativeKernel"
_TORCH_ROOT = os.path.dirname(torch.__file__)

# PrimitiveType numbers of the public xla_data.proto.
_ELEMENT_TYPES = {
    torch.bool: 1,
    torch.int8: 2,
    torch.int16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.uint8: 6,
    torch.float16: 10,
    torch.float32: 11,
    torch.float64: 12,
    torch.bfloat16: 16,
}

# Operators whose result depends on values in its shape or leaves the device.
_DATA_DEPENDENT = {
    "_local_scalar_dense": "reads a tensor's value (.item(), bool(), int() or a Python `if` on it)",
    "nonzero": "makes a shape from tensor values (nonzero or a boolean index)",
    "masked_select": "makes a shape from tensor values (masked_select)",
    "_unique2": "makes a shape from tensor values (unique)",
    "unique_dim": "makes a shape from tensor values (unique)",
    "equal": "compares tensor values in Python (torch.equal)",
}

# Operators that move, rename or fill data and compute nothing: not worth a record.
# fmt: off
_VIEWS = frozenset({
    "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "arange", "as_strided", "clone",
    "copy_", "detach", "empty", "empty_like", "expand", "fill_", "full", "lift_fresh", "narrow",
    "new_empty", "ones", "permute", "reshape", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "zero_", "zeros",
})
# fmt: on


@dataclass(frozen=True)
class Dot:
    """One matrix product: operand shapes and the dimensions that they share."""

    lhs: Tuple[int, ...]
    rhs: Tuple[int, ...]
    lhs_contracting: Tuple[int, ...]
    rhs_contracting: Tuple[int, ...]
    batch: Tuple[int, ...] = ()

    @property
    def macs(self) -> int:
        """Multiply-accumulates: every lhs element times the rhs columns that it meets."""
        count = 1
        for size in self.lhs:
            count *= size
        for dim, size in enumerate(self.rhs):
            if dim not in self.rhs_contracting and dim not in self.batch:
                count *= size
        return count


_PRODUCTS = frozenset({"mm", "bmm", "mv", "dot"})
_PRODUCTS_WITH_ADDEND = frozenset({"addmm", "_addmm_activation", "baddbmm", "addbmm", "addmv"})


def _matrix_dots(name: str, shapes: Sequence[Tuple[int, ...]]) -> List[Dot]:
    """The products inside an aten operator, [] where it is none; `shapes` are its tensors'."""
    if name.startswith("_scaled_dot_product"):
        query, key, value = shapes[:3]
        weights = (*query[:3], key[2])
        return [
            Dot(query, key, (3,), (3,), (0, 1)),
            Dot(weights, value, (3,), (2,), (0, 1)),
        ]
    if name in _PRODUCTS_WITH_ADDEND:
        shapes = shapes[1:]
    elif name not in _PRODUCTS:
        return []
    lhs, rhs = shapes[:2]
    if len(lhs) == 3:
        return [Dot(lhs, rhs, (2,), (1,), (0,))]
    return [Dot(lhs, rhs, (len(lhs) - 1,), (0,))]


@dataclass
class Operator:
    """One recorded operation: who asked for it, what ran, with which shapes, how much work."""

    operator: str  # path of the module inside the model
    ran: str  # "kernel" or "torch"
    name: str  # the kernel's or the operator's name
    shapes: List[List[int]]
    macs: int
    count: int = 1

    def as_json(self) -> Dict[str, Any]:
        return dict(vars(self))


@dataclass
class GraphRecord:
    """What one sub-model and bucket consists of."""

    tag: str
    bucket: int
    operators: List[Operator] = field(default_factory=list)
    elementwise: Dict[str, Counter] = field(default_factory=dict)  # module -> operator names

    def as_json(self) -> Dict[str, Any]:
        plain = [
            Operator(path, "torch", "elementwise", [], 0, sum(names.values())).as_json()
            | {"names": dict(names)}
            for path, names in self.elementwise.items()
        ]
        return {
            "submodel": self.tag,
            "bucket": self.bucket,
            "macs": sum(op.macs for op in self.operators),
            "nki_macs": sum(op.macs for op in self.operators if op.ran == "kernel"),
            "operators": [op.as_json() for op in self.operators] + plain,
        }


_META, _CPU = torch.device("meta"), torch.device("cpu")


def _as_meta(value: Any) -> Any:
    """The shape of a tensor, anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)


def _written(func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> List[torch.Tensor]:
    """The tensors that an operator changes in place."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return found


def _model_line() -> str:
    """file:line of the innermost frame that is neither PyTorch's nor this module's."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_TORCH_ROOT) and path != __file__:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


class GraphRecorder(TorchDispatchMode):
    """Records what a forward does, operator by operator, and builds the graph of it."""

    def __init__(self, tag: str, bucket: int) -> None:
        super().__init__()
        self.record = GraphRecord(tag, bucket)
        self._path: List[str] = []
        self._tainted: Dict[int, torch.Tensor] = {}  # storages of constants written by the trace
        self._module = hlo_pb2.HloModuleProto(
            name=f"{tag}_{bucket}", entry_computation_name="main", entry_computation_id=1, id=1
        )
        self._computation = self._module.computations.add(name="main", id=1)
        self._next_id = 1

    def watch(self, model: nn.Module) -> List[Any]:
        """Follow which module runs; returns the hook handles to remove afterwards."""
        handles = []
        for path, module in model.named_modules():
            handles.append(
                module.register_forward_pre_hook(lambda _m, _a, path=path: self._path.append(path))
            )
            handles.append(
                module.register_forward_hook(lambda _m, _a, _o: self._pop(), always_call=True)
            )
        return handles

    def _pop(self) -> None:
        self._path.pop()

    @property
    def _where(self) -> str:
        return self._path[-1] if self._path else ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[dict] = None
    ) -> Any:
        name = func.overloadpacket.__name__
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        traced = any(self._is_traced(tensor) for tensor in tensors)
        if traced and name in _DATA_DEPENDENT:
            raise CompileError(
                f"{_model_line()} {_DATA_DEPENDENT[name]}, expected a forward that only shapes "
                "steer, as it is traced once for every input; use torch.where or masks instead."
            )
        if kwargs.get("device") is not None:  # one device for all: constants stay constants
            kwargs["device"] = _META if traced else _CPU
        if traced:
            for tensor in _written(func, args, kwargs):
                if not tensor.is_meta:
                    self._tainted[_storage_id(tensor)] = tensor
            args, kwargs = tree_map(_as_meta, (args, kwargs))
        result = func(*args, **kwargs)
        shapes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
        dots = _matrix_dots(name, shapes)
        for dot in dots:
            self._add_dot(name, dot, result)
        if not dots and name not in _VIEWS:
            self.record.elementwise.setdefault(self._where, Counter())[name] += 1
        return result

    def _is_traced(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends on inputs or weights: a shape, or a constant written to."""
        return tensor.is_meta or _storage_id(tensor) in self._tainted

    def _instruction(self, opcode: str, shape: Sequence[int], dtype: torch.dtype) -> Any:
        instruction = self._computation.instructions.add(
            name=f"{opcode}.{self._next_id}", opcode=opcode, id=self._next_id
        )
        instruction.shape.element_type = _ELEMENT_TYPES.get(dtype, 11)
        instruction.shape.dimensions.extend(shape)
        self._next_id += 1
        return instruction

    def _operand(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        parameter = self._instruction("parameter", shape, dtype)
        parameter.parameter_number = parameter.id
        return parameter.id

    def _add_dot(self, name: str, dot: Dot, result: Any) -> None:
        output = result[0] if isinstance(result, (tuple, list)) else result
        operands = [self._operand(shape, output.dtype) for shape in (dot.lhs, dot.rhs)]
        instruction = self._instruction("dot", output.shape, output.dtype)
        instruction.operand_ids.extend(operands)
        numbers = instruction.dot_dimension_numbers
        numbers.lhs_contracting_dimensions.extend(dot.lhs_contracting)
        numbers.rhs_contracting_dimensions.extend(dot.rhs_contracting)
        numbers.lhs_batch_dimensions.extend(dot.batch)
        numbers.rhs_batch_dimensions.extend(dot.batch)
        shapes = [list(dot.lhs), list(dot.rhs)]
        self.record.operators.append(Operator(self._where, "torch", name, shapes, dot.macs))

    def add_kernel(self, call: Any) -> None:
        """Callback of `observe_kernel_calls`: one top-level kernel call."""
        macs = int(call.program.macs)
        config = {"func_name": call.name, "mac_count": macs}
        operands = [self._operand(t.shape, t.dtype) for t in call.inputs]
        first = call.outputs[0]
        instruction = self._instruction("custom-call", first.shape, first.dtype)
        instruction.custom_call_target = KERNEL_TARGET
        instruction.backend_config = base64.b64encode(json.dumps(config).encode())
        instruction.operand_ids.extend(operands)
        shapes = [list(t.shape) for t in call.inputs]
        self.record.operators.append(Operator(self._where, "kernel", call.name, shapes, macs))

    def graph(self) -> bytes:
        """The HloModuleProto of everything recorded, serialised."""
        self._computation.root_id = self._next_id - 1
        return self._module.SerializeToString()


# How PyTorch complains when a meta tensor's values are asked for.
_VALUE_NEEDED = re.compile(r"(?<![a-z])meta(?![a-z])|unallocated storage")


class _LiteralsOnCpu(TorchFunctionMode):
    """torch.tensor(..., device=meta) would lose its values before the recorder sees it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[dict] = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor):
            kwargs.pop("device", None)
        return func(*args, **kwargs)


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _tracing() -> Iterator[None]:
    """Ahead-of-time mode, with torch.autocast accepting the device of the traced tensors.

    Rotary embeddings of Hugging Face's kind switch autocast off for `x.device.type`.
    """
    original = torch.autocast.__init__

    def autocast_init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast.__init__ = autocast_init
    parallel_state.set_aot_mode(True)
    try:
        yield
    finally:
        parallel_state.set_aot_mode(False)
        torch.autocast.__init__ = original


def _shapes_only(model: nn.Module) -> None:
    """Move the parameters to the meta device; buffers keep their values, they are constants."""
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    model.to(_META)
    for module, own in buffers:
        module._buffers.update(own)


def _explain(error: Exception, tag: str, bucket: int) -> Exception:
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


def trace(
    model: nn.Module, inputs: Sequence[torch.Tensor], tag: str, bucket: int
) -> Tuple[GraphRecord, bytes]:
    """Run `model` on the shapes of `inputs`; returns the record and the serialised graph.

    Inputs and weights are on the meta device: no values, no memory. CompileError names the
    model's line where Python depends on a value; a kernel's refusal passes through as it is.
    """
    _shapes_only(model)
    meta_inputs = [_as_meta(tensor) for tensor in inputs]
    recorder = GraphRecorder(tag, bucket)
    handles = recorder.watch(model)
    try:
        observed = observe_kernel_calls(recorder.add_kernel)
        with torch.no_grad(), _tracing(), _LiteralsOnCpu(), recorder, observed:
            model(*meta_inputs)
    except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
        explained = _explain(error, tag, bucket)
        if explained is error:
            raise
        raise explained from error
    finally:
        for handle in handles:
            handle.remove()
    return recorder.record, recorder.graph()
