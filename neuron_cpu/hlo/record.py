"""What an HLO module does, as the record of events that the estimate of a graph reads.

The estimate knows PyTorch's operators (`runtime.outside`), so each instruction takes the name of
the one that does the same work. Nothing is run, and jaxlib is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_neuronx.pyhlo.scribe import TORCH as TYPES
from torch_neuronx.pyhlo.xla_data_pb2 import PrimitiveType

from ..errors import CompileError
from ..runtime import collectives
from ..runtime.recording import COLLECTIVE, KERNEL, TORCH, Dot, Event, GraphRecord, TensorShape
from . import calls

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
WHOLE, HEAD = "fully_unrolled", "ln_lm_head"  # graphs that give logits or tokens
_AS_STORED = frozenset({"convert", "copy", "parameter", "reshape", "transpose", _RING})


@dataclass(frozen=True)
class Call:
    """What one call of a saved graph takes and gives, as Transformers NeuronX lays it out
    (aws-neuron/transformers-neuronx 1ade6d7, decoder.py).

    Attributes:
        name: of the graph.
        batch, tokens: sequences, and tokens of each.
        cached: positions of its caches; 0 where it has none.
        ranks: that its collectives join.
        logits: rows of logits fp32 of a sequence, or as many bytes; 0 where it gives none.
    """

    name: str
    batch: int
    tokens: int
    cached: int
    ranks: int
    logits: float


def call_of(module: Any) -> Call:
    """Read the sizes of a call from the shapes of an HloModuleProto."""
    shapes, result = module.host_program_shape.parameters, module.host_program_shape.result
    groups = (g for c in module.computations for i in c.instructions for g in i.replica_groups)
    ranks = max((len(group.replica_ids) for group in groups), default=1)
    name, [first, *_] = module.name.rpartition(".")[0] or module.name, _shapes(result)
    scores = name in (WHOLE, HEAD) and len(first.shape) == 3
    logits = first.shape[1] * first.dtype.itemsize / 4 if scores else 0.0
    caches = module.input_output_alias.entries
    if not caches:
        return Call(name, 1, 1, 0, ranks, logits)
    tokens, batch = (shapes[number].dimensions[-1] for number in (1, 2))
    cached = max(shapes[caches[0].parameter_number].dimensions[:2])  # and sequences, in any order
    return Call(name, batch, tokens, cached, ranks, logits)


def record(module: Any) -> GraphRecord:
    """The events of the entry computation of an HloModuleProto, in order.

    Raises:
        CompileError: an instruction that runs another computation, or a kernel that cannot be read.
    """
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    known = {instruction.id: instruction for instruction in entry.instructions}
    found = GraphRecord(module.name, 0)
    for instruction in entry.instructions:
        name = _name(instruction)
        if name in _ENTERS:
            raise CompileError(
                f"The graph {module.name} has {name}, expected operators that compute by "
                "themselves; its time cannot be estimated, so profile that part alone."
            )
        operands = [known[id] for id in instruction.operand_ids]
        inputs = tuple(shape for operand in operands for shape in _shapes(operand.shape))
        outputs = _shapes(instruction.shape)
        if name == "dot":
            found.events.append(_product(instruction, operands, known))
        elif name == calls.KERNEL:
            program = calls.program_of(instruction.backend_config)
            call = inputs, outputs, int(program.macs), program
            found.events.append(Event("", KERNEL, program.name, *call))
        elif name not in _FREE and not (name == "convert" and inputs == outputs):
            kind = COLLECTIVE if name in _COLLECTIVES else TORCH
            found.events.append(Event("", kind, _SAME.get(name, name), inputs, outputs))
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
