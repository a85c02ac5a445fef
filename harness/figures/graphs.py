"""The parts of a compiled model: operators, the place where they run, and their MACs.

The stand-in's record names the module of each operator, beside each graph where the real library
compiles. A device compile leaves graph.hlo files
only: there the products and kernels are known, but not which module asked for them.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

from pydantic import BaseModel, Field, TypeAdapter

from harness.errors import UserError
from harness.inputs.chunks import chunk_starts

# sub-models, by NxDI's tags; that of several tokens a step takes chunks of a prompt
PREFILL, DECODE, CHUNK = "context_encoding_model", "token_generation_model", "speculation_model"
Call = tuple[str, int]  # a sub-model, and the tokens that its bucket has to hold
KERNEL_TARGET = "AwsNeuronCustomNativeKernel"
RECORD = "operators.json"
_LAYER = re.compile(r"\blayers\.\d+")


@dataclass(frozen=True)
class Operator:
    """One operator; `macs` is None for a kernel whose compiler left no count."""

    operator: str  # path of the module inside the model, "" where unknown
    in_kernel: bool
    name: str
    macs: Optional[int]
    count: int = 1
    shapes: tuple[tuple[int, ...], ...] = ()  # of a kernel's inputs, of a product's factors


@dataclass(frozen=True)
class Graph:
    """One sub-model and bucket."""

    submodel: str
    bucket: int
    operators: tuple[Operator, ...]
    instructions: Optional[int] = None  # traced in its kernels, where the stand-in compiled it
    prior: int = 0  # cached tokens that a prompt's graph reads, tiles of them in a chunk
    # operators of PyTorch but products -> how many there are, and elements of their results
    others: Optional[dict[str, tuple[int, int]]] = None

    @property
    def sizes(self) -> str:
        """The bucket in words."""
        return sizes(self.bucket, self.prior)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one rank and one call."""
        return sum(row.macs or 0 for row in self.operators)

    @property
    def nki_macs(self) -> int:
        return sum(row.macs or 0 for row in self.operators if row.in_kernel)

    @property
    def nki_share(self) -> float:
        return self.nki_macs / self.macs if self.macs else 0.0

    @property
    def uncounted_kernels(self) -> list[str]:
        """Names of kernels without a MAC count."""
        return sorted({row.name for row in self.operators if row.in_kernel and row.macs is None})

    def grouped(self) -> list[Operator]:
        """Equal operators of all layers as one row each, in order of first appearance."""
        rows: dict[tuple[str, bool, str], Operator] = {}
        for row in self.operators:
            place = _LAYER.sub("layers.*", row.operator)
            key = (place, row.in_kernel, row.name)
            seen = rows.get(key)
            if seen is None:
                rows[key] = replace(row, operator=place)
            else:
                macs = None if row.macs is None else (seen.macs or 0) + row.macs
                rows[key] = replace(seen, count=seen.count + row.count, macs=macs)
        return list(rows.values())


def sizes(bucket: int, prior: int) -> str:
    """A bucket in words: its length, or new tokens + cached tokens."""
    return f"{bucket}+{prior}" if prior else str(bucket)


def prompt_calls(tokens: int, longest: int, chunk: Optional[int], most: int) -> list[Call]:
    """The calls that a prompt takes: one prefill, or its largest, chunks and a decode step.

    `longest` and `most` are the largest buckets of prefill and decode.
    """
    if chunk is None or tokens <= longest:
        return [(PREFILL, tokens)]
    starts = chunk_starts(tokens, longest, chunk, most)
    return [(PREFILL, longest), *((CHUNK, start + chunk) for start in starts), (DECODE, tokens)]


def read(folder: Path) -> list[Graph]:
    """The graphs of a compiled folder, prefill first, buckets ascending."""
    try:
        if (folder / RECORD).is_file():
            graphs = [_from_record(entry) for entry in _read(folder / RECORD).graphs]
        elif records := sorted(folder.glob(f"graphs/*/*/{RECORD}")):
            graphs = [_from_record(_read(path).graphs[0]) for path in records]
        else:
            graphs = list(_from_hlo(folder))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"The graphs in {folder} cannot be read; --recompile builds them anew."
        ) from error
    return sorted(graphs, key=lambda graph: (graph.submodel, graph.bucket, graph.prior))


class _Row(BaseModel):
    """One row of operators.json."""

    operator: str
    ran: Literal["kernel", "torch"]
    name: str
    names: Optional[dict[str, int]] = None
    shapes: list[list[Annotated[int, Field(ge=0)]]] = []  # of a product, its two factors
    macs: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(ge=1)]


class _GraphRecord(BaseModel):
    submodel: str
    bucket: Annotated[int, Field(ge=1)]
    prior: Annotated[int, Field(ge=0)] = 0
    operators: list[_Row]
    others: dict[str, tuple[int, int]] = {}
    instructions: Optional[int] = None


class _Record(BaseModel):
    graphs: list[_GraphRecord]


_RECORD = TypeAdapter(_Record)


def _read(path: Path) -> _Record:
    return _RECORD.validate_python(json.loads(path.read_text(encoding="utf-8")))


def _from_record(entry: _GraphRecord) -> Graph:
    operators = tuple(
        Operator(
            row.operator,
            row.ran == "kernel",
            row.name if row.names is None else ", ".join(sorted(row.names)),
            row.macs if row.ran == "kernel" else _product_macs(row.shapes),
            row.count,
            tuple(map(tuple, row.shapes)),
        )
        for row in entry.operators
    )
    return Graph(
        entry.submodel, entry.bucket, operators, entry.instructions, entry.prior, entry.others
    )


def from_records(content: Any) -> list[Graph]:
    """Graphs in the form of operators.json; a ValueError where it is another one."""
    return [_from_record(entry) for entry in _RECORD.validate_python({"graphs": content}).graphs]


def _product_macs(shapes: list[list[int]]) -> int:
    """MACs of a product outside of kernels, whatever the record says: [.., M, K] by [.., K, N]."""
    if len(shapes) != 2:
        return 0
    lhs, rhs = shapes
    return math.prod(lhs) * (rhs[-1] if len(rhs) > 1 else 1)


def _from_hlo(folder: Path) -> Iterator[Graph]:
    """Graphs of a device compile; the bucket is its length, taken from the configuration."""
    from torch_neuronx.pyhlo.hlo_pb2 import HloModuleProto

    for path in sorted((folder / "graphs").glob("*/_tp0_bk*/model/graph.hlo")):
        module = HloModuleProto()
        module.ParseFromString(path.read_bytes())
        index = int(path.parent.parent.name.removeprefix("_tp0_bk"))
        yield Graph(path.parts[-4], index, tuple(_hlo_operators(module)))


def _hlo_operators(module: Any) -> Iterator[Operator]:
    for computation in module.computations:
        shapes = {item.id: item.shape.dimensions for item in computation.instructions}
        for item in computation.instructions:
            if item.opcode == "custom-call" and item.custom_call_target == KERNEL_TARGET:
                yield _kernel(item.backend_config)
            elif item.opcode == "dot":
                lhs, rhs = (shapes[operand] for operand in item.operand_ids[:2])
                yield Operator("", False, "dot", dot_macs(lhs, rhs, item.dot_dimension_numbers))


def _kernel(backend_config: bytes) -> Operator:
    """A kernel call; compilers that keep no `mac_count` leave the count unknown."""
    try:
        config = json.loads(base64.b64decode(backend_config))
    except ValueError:
        config = {}
    count = config.get("mac_count")
    return Operator("", True, config.get("func_name", "?"), None if count is None else int(count))


def dot_macs(lhs: Any, rhs: Any, numbers: Any) -> int:
    """Every element of `lhs` meets the columns of `rhs` that are neither contracted nor batched."""
    shared = set(numbers.rhs_contracting_dimensions) | set(numbers.rhs_batch_dimensions)
    free = [size for axis, size in enumerate(rhs) if axis not in shared]
    return math.prod(lhs) * math.prod(free)
