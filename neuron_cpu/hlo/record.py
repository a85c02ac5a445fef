"""What an HLO module does, as the record of events that the estimate of a graph reads.

The estimate knows PyTorch's operators (`runtime.outside`), so each instruction takes the name of
the one that does the same work. Nothing is run, and jaxlib is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch_neuronx.pyhlo.scribe import TORCH as TYPES
from torch_neuronx.pyhlo.xla_data_pb2 import PrimitiveType

from ..errors import CompileError
from ..runtime import collectives
from ..runtime.recording import COLLECTIVE, TORCH, Dot, Event, GraphRecord, TensorShape

_RING = "AwsNeuronTransferWithStaticRing"
# No data move: values are renamed, are known to the compiler, or are read as its operand is.
_FREE = frozenset(
    {"bitcast", "broadcast", "constant", "copy", "get-tuple-element", "iota", "parameter"}
    | {"replica-id", "reshape", "transpose", "tuple", _RING}
)
_COLLECTIVES = frozenset(
    {collectives.ALL_REDUCE, collectives.ALL_GATHER}
    | {collectives.REDUCE_SCATTER, collectives.ALL_TO_ALL}
)
_ENTERS = frozenset({"call", "conditional", "fusion", "while"})
_SAME = {
    "AwsNeuronSoftmax": "_softmax",
    "AwsNeuronRmsNorm": "native_layer_norm",
    "batch-norm-training": "native_layer_norm",
    "concatenate": "cat",
    "dynamic-slice": "index_select",
    "dynamic-update-slice": "slice_scatter",
}
_AS_STORED = frozenset({"convert", "copy", "parameter", "reshape", "transpose", _RING})


def record(module: Any, tag: str, bucket: int) -> GraphRecord:
    """The events of the entry computation of an HloModuleProto, in order.

    Raises:
        CompileError: an instruction that runs another computation, or a kernel of NKI, whose
            program is not in the module.
    """
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    known = {instruction.id: instruction for instruction in entry.instructions}
    found = GraphRecord(tag, bucket)
    for instruction in entry.instructions:
        name = _name(instruction)
        if name in _ENTERS or name == "AwsNeuronCustomNativeKernel":
            raise CompileError(
                f"The graph {module.name} has {name}, expected operators that compute by "
                "themselves; its time cannot be estimated, so profile that part alone."
            )
        operands = [known[id] for id in instruction.operand_ids]
        if name == "dot":
            found.events.append(_product(instruction, operands, known))
        elif name not in _FREE and not _unchanged(instruction, operands):
            kind = COLLECTIVE if name in _COLLECTIVES else TORCH
            inputs = [shape for operand in operands for shape in _shapes(operand.shape)]
            outputs = _shapes(instruction.shape)
            found.events.append(Event("", kind, _SAME.get(name, name), tuple(inputs), outputs))
    return found


def _name(instruction: Any) -> str:
    if instruction.opcode == "custom-call":
        return str(instruction.custom_call_target)
    return str(instruction.opcode)


def _shapes(proto: Any) -> tuple[TensorShape, ...]:
    """The shape of a result, or those of a tuple's."""
    return tuple(
        TensorShape(tuple(each.dimensions), TYPES[PrimitiveType(each.element_type)])
        for each in proto.tuple_shapes or [proto]
    )


def _unchanged(instruction: Any, operands: Sequence[Any]) -> bool:
    """Whether a conversion keeps the type."""
    same = instruction.opcode == "convert"
    return same and instruction.shape.element_type == operands[0].shape.element_type


def _is_stored(instruction: Any, known: dict[int, Any]) -> bool:
    """Whether a value is a parameter in another form: weights are."""
    while _name(instruction) in _AS_STORED - {"parameter"}:
        instruction = known[instruction.operand_ids[0]]
    return bool(instruction.opcode == "parameter")


def _product(instruction: Any, operands: Sequence[Any], known: dict[int, Any]) -> Event:
    """A product as PyTorch's of two matrices, or of batches of them; weights are its right side,
    which stands in TensorE, on whichever side they are here."""
    numbers = instruction.dot_dimension_numbers
    sides = [
        (operands[0], numbers.lhs_batch_dimensions, numbers.lhs_contracting_dimensions),
        (operands[1], numbers.rhs_batch_dimensions, numbers.rhs_contracting_dimensions),
    ]
    if _is_stored(operands[0], known) and not _is_stored(operands[1], known):
        sides.reverse()
    (batch, deep, rows), (_, _, columns) = (_counts(*side) for side in sides)
    shapes: list[tuple[int, ...]] = [(rows, deep), (deep, columns)]
    if numbers.lhs_batch_dimensions:
        shapes = [(batch, *shape) for shape in shapes]
    name = "bmm" if numbers.lhs_batch_dimensions else "mm"
    inputs = tuple(
        TensorShape(shape, _shapes(side[0].shape)[0].dtype) for shape, side in zip(shapes, sides)
    )
    dot = Dot.of(name, shapes)
    assert dot is not None
    return Event("", TORCH, name, inputs, _shapes(instruction.shape), dot.macs)


def _counts(operand: Any, batch: Sequence[int], deep: Sequence[int]) -> tuple[int, int, int]:
    """Elements of an operand by its dimensions: batch, contracted, the others."""
    sizes = operand.shape.dimensions
    of_batch, of_deep = (math.prod(sizes[dim] for dim in dims) for dims in (batch, deep))
    return of_batch, of_deep, math.prod(sizes) // (of_batch * of_deep)
