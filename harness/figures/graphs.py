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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from harness.errors import UserError
from harness.inputs.chunks import chunk_starts
from harness.processes.workers import SubmissionFailed
from harness.session.opening import Session
from harness.settings import Speculation

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
    macs: NonNegativeInt | None
    count: PositiveInt = 1
    shapes: tuple[tuple[NonNegativeInt, ...], ...] = ()  # of inputs, or of factors
    program: str = ""  # fingerprint of a kernel that the stand-in compiled


@dataclass(frozen=True)
class Graph:
    """One sub-model and bucket."""

    submodel: str
    bucket: NonNegativeInt
    operators: tuple[Operator, ...]
    instructions: int | None = None  # traced in its kernels, where the stand-in compiled it
    prior: NonNegativeInt = 0  # cached tokens that a prompt's graph reads, tiles of them in a chunk
    # operators of PyTorch but products -> how many there are, and elements of their results
    others: dict[str, tuple[int, int]] = field(default_factory=dict)

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
    def programs(self) -> Counter[str]:
        """How often it calls each program of a kernel, by fingerprint."""
        rows = Counter[str]()
        for row in self.operators:
            if row.in_kernel:
                rows[row.program] += row.count
        return rows

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


def prompt_calls(tokens: int, longest: int, chunk: int | None, most: int) -> list[Call]:
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
            graphs = _read(folder / RECORD)
        elif records := sorted(folder.glob(f"graphs/*/*/{RECORD}")):
            graphs = [_read(path)[0] for path in records]
        else:
            graphs = list(_from_hlo(folder))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"The graphs in {folder} cannot be read; --recompile builds them anew."
        ) from error
    return sorted(graphs, key=lambda graph: (graph.submodel, graph.bucket, graph.prior))


class _Record(BaseModel):
    graphs: list[Graph]


def _read(path: Path) -> list[Graph]:
    return from_records(json.loads(path.read_bytes()))


def from_records(content: Any) -> list[Graph]:
    """Graphs in the form of operators.json; a ValueError where it is another one."""
    return [
        replace(graph, operators=tuple(map(_counted, graph.operators)))
        for graph in _Record.model_validate(content).graphs
    ]


def _counted(row: Operator) -> Operator:
    """An operator with the MACs of its shapes, whatever the record says: [.., M, K] by [.., K, N]
    outside of kernels, which have a count."""
    if row.in_kernel:
        return replace(row, macs=row.macs or 0)
    lhs, rhs = row.shapes if len(row.shapes) == 2 else ((0,), ())
    return replace(row, macs=math.prod(lhs) * (rhs[-1] if len(rhs) > 1 else 1))


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


@dataclass(frozen=True)
class NkiShare:
    """Two ratios, the products outside of kernels, and kernels whose work nobody counted."""

    contest: float  # MACs in NKI over all MACs, smallest bucket of prefill and decode, once each
    weighted: float  # the same with each graph weighted by how often one generation runs it
    outside: list[str]  # "sub-model: operator (share of its MACs)"
    warnings: list[str]


def nki_share(
    graphs: Sequence[Graph],
    prompt_tokens: int,
    new_tokens: int,
    chunk: int | None = None,
    speculation: Speculation | None = None,
) -> NkiShare:
    """The NKI share of one generation of `new_tokens` tokens behind a prompt, of which calls
    after a first take `chunk` tokens. Steps of speculation count once for each token."""
    alone = any(graph.submodel == DECODE for graph in graphs)
    step, tokens = (speculation.submodel, speculation.length) if speculation else (DECODE, 1)
    first = [bucket_of(graphs, name, 0) for name in (PREFILL, DECODE if alone else step)]
    longest, most = (
        max((g.bucket for g in graphs if g.submodel == name), default=prompt_tokens)
        for name in (PREFILL, DECODE)
    )
    calls = prompt_calls(prompt_tokens, longest, chunk, most) + [
        (step, position + tokens)
        for position in range(prompt_tokens, prompt_tokens + new_tokens - 1)
    ]
    runs = [(bucket_of(graphs, *call), 1) for call in calls]
    return NkiShare(
        contest=_ratio([(graph, 1) for graph in first]),
        weighted=_ratio(runs),
        outside=[
            f"{graph.submodel}: {product}" for graph in first if graph for product in outside(graph)
        ],
        warnings=[
            f"{graph.submodel}, bucket {graph.bucket}: no MAC count for the kernels "
            f"{', '.join(graph.uncounted_kernels)}; their work is missing from the NKI share."
            for graph in graphs
            if graph.uncounted_kernels
        ],
    )


def bucket_of(graphs: Sequence[Graph], submodel: str, length: int) -> Graph | None:
    """The smallest graph of a sub-model that holds `length` tokens, or the largest."""
    ordered = sorted((g for g in graphs if g.submodel == submodel), key=lambda g: g.bucket)
    if not ordered:
        return None
    return next((graph for graph in ordered if graph.bucket >= length), ordered[-1])


def _ratio(runs: Sequence[tuple[Graph | None, int]]) -> float:
    total = sum(graph.macs * times for graph, times in runs if graph)
    return sum(graph.nki_macs * times for graph, times in runs if graph) / total if total else 0.0


def outside(graph: Graph) -> list[str]:
    """Each product outside NKI with its share of the graph's MACs."""
    return [
        f"{row.operator or row.name} ({row.macs / graph.macs:.2%} of its MACs)"
        for row in graph.grouped()
        if not row.in_kernel and row.macs
    ]


# A submission may keep its weights in fewer bytes than the checkpoint; one is the least that
# TensorE takes.
WEIGHT_BYTES = 1


@dataclass(frozen=True)
class Floor:
    """Least MACs, and least weights read, of one execution of a graph on one rank."""

    macs: int
    weights: int


def floor(session: Session, submodel: str, bucket: int) -> Floor:
    """The bounds of one graph; work that ranks share is divided by their number."""
    config, settings, model = session.model.config, session.settings, session.model
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    queries, keys = (heads * model.head_dim for heads in model.heads)
    caches = 2 * hidden * keys  # projections to what the caches keep
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    experts = config.get("num_experts_per_tok", 1) * 3 * hidden * inner
    layer = caches + 2 * hidden * queries + experts + hidden * config.get("num_experts", 0)
    head = hidden * config["vocab_size"]
    rows = settings.batch_size
    several = settings.speculation.length if settings.speculation else settings.prefill_chunk
    step = settings.speculation.submodel if settings.speculation else CHUNK
    tokens = rows * {PREFILL: bucket, step: several or 1}.get(submodel, 1)
    # All of every layer but the last, of that its caches; the last token of each row goes through
    # the rest of it and the head.
    macs = tokens * ((layers - 1) * layer + caches) + rows * (layer - caches + head)
    ranks = settings.tp_degree or 1
    return Floor(macs // ranks, (layers * layer + head) // ranks)


def check_macs(session: Session, graphs: Sequence[Graph]) -> None:
    """Refuse counts below what each graph has to compute."""
    for graph in graphs:
        if graph.uncounted_kernels:  # their work is missing, and a warning says so
            continue
        least = floor(session, graph.submodel, graph.bucket).macs
        if graph.macs < least:
            raise SubmissionFailed(
                f"{graph.submodel}, bucket {graph.bucket}: its process counts {graph.macs:,} MACs, "
                f"expected at least {least:,}, which the model's own sizes take; leave the "
                "counting unchanged, and compute every product of the model."
            )


def check_time(session: Session, submodel: str, bucket: int, milliseconds: float) -> None:
    """Refuse an estimate below what TensorE and HBM alone need, and the launch."""
    from harness.simulator import cost, spec  # PyTorch's time, which most modes do without

    least, core, launch = floor(session, submodel, bucket), spec.GEN2, cost.Overheads()
    computing = least.macs / core.peak_macs_per_ns
    reading = WEIGHT_BYTES * least.weights / core.hbm_bytes_per_ns
    needed = (launch.step_ns(rows=0) + max(computing, reading)) / 1e6
    if milliseconds < needed:
        raise SubmissionFailed(
            f"{submodel}, bucket {bucket}: its process estimates {milliseconds:.4g} ms, expected "
            f"at least {needed:.4g} ms, which its products and weights alone take; leave the cost "
            "model unchanged."
        )
