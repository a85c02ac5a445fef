"""PyHLO: writes an HloModuleProto by calling operators on shapes.

`HloScribe(serialize)(function)` calls `function(scribe)` and makes a module of what it returns.
`scribe.f32[4, 8].Add(x, y)` adds one instruction `add` of that shape: the operators of XLA in
capitals, attributes by the names of `HloInstructionProto`.

Source of names and arguments: aws-neuron/transformers-neuronx 1ade6d7 (hlo.py, compiler.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from . import hlo_pb2
from .xla_data_pb2 import PrimitiveType

_MUST_ALIAS = 2  # hlo.proto, Kind
_OPCODES = {"Exp": "exponential", "Sin": "sine", "Cos": "cosine"}
_TYPES = """
PRED:bool S8:int8 S16:int16 S32:int32 S64:int64 U8:uint8 U16:uint16 U32:uint32 U64:uint64
F16:float16 F32:float32 F64:float64 BF16:bfloat16 F8E5M2:float8_e5m2 F8E4M3FN:float8_e4m3fn
"""
TORCH = {
    PrimitiveType[name]: getattr(torch, theirs)
    for name, theirs in (pair.split(":") for pair in _TYPES.split())
}


class HloShape:
    """A type (no sizes), a shape, or the value of an instruction.

    Attributes:
        sizes: the dimensions.
        shape_proto: the `ShapeProto`.
        instruction: the `HloInstructionProto` of a value, else None.
        scribe: the module that is being written.
    """

    def __init__(self, scribe: HloScribe, shape_proto: Any, instruction: Any = None) -> None:
        self.scribe, self.shape_proto, self.instruction = scribe, shape_proto, instruction
        self.sizes = tuple(shape_proto.dimensions)

    @property
    def dtype(self) -> HloShape:
        """The type of the elements."""
        return self.scribe.of_type(self.shape_proto.element_type)

    def __getitem__(self, sizes: int | Sequence[int]) -> HloShape:
        """The shape of these sizes and this type."""
        sizes = [sizes] if isinstance(sizes, int) else list(sizes)
        return HloShape(self.scribe, _array(self.shape_proto.element_type, sizes))

    def _key(self) -> tuple[Any, ...]:
        value = None if self.instruction is None else self.instruction.id
        return (self.shape_proto.SerializeToString(deterministic=True), value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HloShape) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __getattr__(self, name: str) -> Callable[..., HloShape]:
        """An operator: it takes values and attributes, and gives the value of this shape."""
        if not name[:1].isupper():
            raise AttributeError(f"HloShape has no attribute {name!r}")
        opcode = _OPCODES.get(name) or re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()
        return partial(self.scribe.add, opcode, self.shape_proto)

    def get_tuple_element(self, tuple_index: int) -> HloShape:
        """One of the values of a tuple."""
        shape = HloShape(self.scribe, self.shape_proto.tuple_shapes[tuple_index])
        return shape.GetTupleElement(self, tuple_index=tuple_index)

    def set_alias_to(self, parameter: HloShape, must: bool = False) -> None:
        """Let this output share the memory of a parameter."""
        self.scribe.aliases.append((self.instruction.id, parameter.instruction.parameter_number))


class HloScribe:
    """Writes one module. `module_proto` is the result."""

    def __init__(self, serialize: Callable[..., Any] | None = None, first_id: int = 1) -> None:
        self.module_proto = hlo_pb2.HloModuleProto()
        self.aliases: list[tuple[int, int]] = []
        self._open: list[Any] = []  # computations that are being written, the innermost last
        self._next_id = first_id

    def __call__(self, function: Callable[[HloScribe], HloShape]) -> HloScribe:
        """Write the module whose entry is `function`, and return the scribe."""
        root = self.compute(function)
        entry = self.module_proto.computations[-1]
        self.module_proto.name = f"{function.__name__}.{root.instruction.id}"
        self.module_proto.entry_computation_name = entry.name
        self.module_proto.entry_computation_id = self.module_proto.id = entry.id
        self.module_proto.host_program_shape.CopyFrom(entry.program_shape)
        outputs = list(root.instruction.operand_ids)
        for value, parameter in self.aliases:
            place = [outputs.index(value)] if root.shape_proto.tuple_shapes else []
            self.module_proto.input_output_alias.entries.add(
                output_shape_index=place, parameter_number=parameter, kind=_MUST_ALIAS
            )
        return self

    def __getattr__(self, name: str) -> HloShape:
        if name.upper() not in PrimitiveType.__members__:
            raise AttributeError(f"HloScribe has no attribute {name!r}")
        return self.of_type(PrimitiveType[name.upper()])

    def get_dtype(self, name: str) -> HloShape:
        """The type named `f32`, `bf16`, `s32`, ..."""
        return getattr(self, name)

    def of_type(self, element_type: int) -> HloShape:
        """The type of a number of `PrimitiveType`."""
        return HloShape(self, _array(element_type, ()))

    def tuple(self, *shapes: HloShape) -> HloShape:
        """The shape of a tuple."""
        proto = hlo_pb2.ShapeProto(element_type=PrimitiveType.TUPLE)
        proto.tuple_shapes.extend(shape.shape_proto for shape in shapes)
        return HloShape(self, proto)

    def compute(self, function: Callable[[HloScribe], HloShape]) -> HloShape:
        """Write one computation, the entry or what an operator applies; its root."""
        made = hlo_pb2.HloComputationProto()
        self._open.append(made)
        root = function(self)
        self._open.pop()
        made.root_id, made.id = root.instruction.id, self._new_id()
        made.name = f"{function.__name__}.{made.id}"
        parameters = [i for i in made.instructions if i.opcode == "parameter"]
        parameters.sort(key=_number)
        made.program_shape.parameters.extend(i.shape for i in parameters)
        made.program_shape.parameter_names.extend(i.name for i in parameters)
        made.program_shape.result.CopyFrom(root.shape_proto)
        self.module_proto.computations.append(made)
        return root

    def add(self, opcode: str, shape: Any, *operands: HloShape, **attributes: Any) -> HloShape:
        """Add an instruction to the computation that is being written; its value.

        Args:
            attributes: fields of the instruction, and: `to_apply`, a function of the scribe;
                `constant_value`, a number; `replica_groups`, lists of ranks.
        """
        called = []
        if (apply := attributes.pop("to_apply", None)) is not None:
            self.compute(apply)
            called = [self.module_proto.computations[-1].id]
        if (value := attributes.pop("constant_value", None)) is not None:
            attributes["literal"] = _literal(shape, value)
        if (groups := attributes.pop("replica_groups", None)) is not None:
            attributes["replica_groups"] = [{"replica_ids": group} for group in groups]
        made = hlo_pb2.HloInstructionProto(opcode=opcode, id=self._new_id(), **attributes)
        made.name = f"{opcode}.{made.id}"
        made.shape.CopyFrom(shape)
        if made.HasField("literal"):
            made.literal.shape.CopyFrom(shape)
        made.operand_ids.extend(operand.instruction.id for operand in operands)
        made.called_computation_ids.extend(called)
        instructions = self._open[-1].instructions
        instructions.append(made)
        return HloShape(self, shape, instructions[-1])

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def _number(parameter: Any) -> int:
    return parameter.parameter_number


def _array(element_type: int, sizes: Sequence[int]) -> Any:
    proto = hlo_pb2.ShapeProto(element_type=element_type, dimensions=sizes)
    proto.is_dynamic_dimension.extend([False] * len(sizes))
    proto.layout.minor_to_major.extend(reversed(range(len(sizes))))
    return proto


def _literal(shape: Any, value: complex) -> Any:
    """The message of a constant whose elements all have one value."""
    kind = PrimitiveType(shape.element_type)
    tensor = torch.full(tuple(shape.dimensions), value, dtype=TORCH[kind]).reshape(-1)
    made = hlo_pb2.LiteralProto()
    field = f"{kind.name.lower()}s"
    if isinstance(getattr(made, field), bytes):
        setattr(made, field, tensor.view(torch.uint8).numpy().tobytes())
    else:
        getattr(made, field).extend(tensor.tolist())
    return made
