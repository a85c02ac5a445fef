"""How far llama.py's estimated times are from what the chip's limits allow, row by row.

    python -m lab.roofline [--model llama-3.2-1b] [--rows decode-640 prefill-640 | --all]

Nothing is measured: the whole graph is traced from shapes and scheduled by the cost model, for
tensor-parallel degree 2, and compared with

bound  the larger of weight and cache bytes over the DMA plateau (one core) and TensorE's cycles for
       the causal work, one moving column of 128 rows a cycle. Scores contract D rows, so a head
       dimension of 64 fills half of the array; the product with values fills it for any D.
floor  the same per stretch (attention, MLP, head), one after another, at TensorE's pace in the cost
       model, and what no kernel can hide: launches, the graph's start, updates of the cache,
       collectives. A prompt of more than 2048 tokens is several executions, as the driver runs it:
       a prefill, chunks over the cache, a decode step.
overlapped  the floor if each collective runs beside the next stretch's transfers: its products wait
       for the collective, its weights do not. No graph of today's compiler is known to do so.
port   the floor if each score also leaves PSUM twice, as in these kernels: for its maximum and as
       an exponential, 128 lanes in a cycle of ScalarE, in instructions of a bank.

What the host does between two graphs is in neither, so that no ratio is flattered by it. Exits with
1 where a row exceeds its target, the ratio of estimate and floor, or has too large a graph; with 2
for bad arguments. A row of up to 2048 tokens takes a second or two, one of 131072 many minutes.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import neuron_cpu

neuron_cpu.ensure_sdk()

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import llama  # noqa: E402
import models.extended  # noqa: E402
from harness import console  # noqa: E402
from harness.figures import tracing  # noqa: E402
from harness.figures.estimate import Estimator, events_of  # noqa: E402
from harness.figures.graphs import CHUNK, DECODE, PREFILL  # noqa: E402
from harness.inputs.chunks import cache_buckets, chunk_starts, default_chunk  # noqa: E402
from harness.inputs.command_line import Parser  # noqa: E402
from harness.model_shapes import MODEL_SHAPES  # noqa: E402
from harness.settings import LONGEST_PREFILL  # noqa: E402
from neuron_cpu.core.device import spec  # noqa: E402
from neuron_cpu.core.device.spec import Engine  # noqa: E402
from neuron_cpu.core.time import cost  # noqa: E402
from neuron_cpu.errors import CompileError  # noqa: E402

DEFAULT_MODEL, DEGREE = "llama-3.2-1b", 2
ITEM = 2  # bytes of bf16
DEVICE_ALONE = cost.Overheads(host_ns=0.0, logits_ns=0.0, argmax_ns=0.0)
SHOWN_SECONDS = 2.0  # a row that took longer says so


class Row(NamedTuple):
    """A phase with its batch and bucket (tokens of a prefill, cached keys of a decode step)."""

    phase: str
    batch: int
    length: int
    target: float

    @property
    def name(self) -> str:
        batch = f"x{self.batch}" if self.batch > 1 else ""
        return f"{self.phase}-{self.length}{batch}"


ROWS = [
    *(Row("decode", 1, length, 1.04) for length in (128, 640, 2048)),
    *(Row("decode", 1, length, 1.12) for length in (8192, 32768, 131072)),
    *(Row("decode", batch, 640, 1.08) for batch in (4, 8)),
    *(Row("prefill", 1, length, 1.08) for length in (64, 128)),
    *(Row("prefill", 1, length, 1.15) for length in (512, 640, 1024, 2048)),
    *(Row("prefill", 1, length, 1.20) for length in (8192, 32768, 131072)),
]
SHORT = [row for row in ROWS if row.length <= 2048]  # a second each to trace and schedule


class Call(NamedTuple):
    """One execution of a graph: new tokens of each sequence, and those cached before."""

    submodel: str
    tokens: int
    cached: int


def calls(config: dict[str, Any], row: Row) -> list[Call]:
    """What a row runs; the last chunk of a prompt ends with it."""
    if row.phase == "decode":
        return [Call(DECODE, 1, row.length)]
    first = min(row.length, LONGEST_PREFILL)
    found = [Call(PREFILL, first, 0)]
    if row.length > first:
        chunk = default_chunk(config, DEGREE, row.length, [first])
        starts = chunk_starts(row.length, first, chunk, row.length)
        found += [Call(CHUNK, chunk, start) for start in starts]
        found.append(Call(DECODE, 1, row.length))
    return found


class Stretch(NamedTuple):
    """One kernel between two collectives: HBM bytes, columns that TensorE moves, and columns of
    scores that leave PSUM, twice each."""

    bytes: float
    columns: float
    passes: float = 0.0

    @property
    def port(self) -> float:
        """Nanoseconds of ScalarE at PSUM."""
        core, bank = spec.GEN2, spec.GEN2.psum_free_max
        cycles = self.passes * (bank + core.engine_start_cycles[Engine.SCALAR]) / bank
        return cycles / core.clock_hz[Engine.SCALAR] * 1e9

    def times(self, plateau: float, pace: float = 1.0) -> dict[str, float]:
        """Nanoseconds by resource; ``plateau`` in bytes per nanosecond, ``pace`` in TensorE's
        cycles a column."""
        rate = spec.GEN2.peak_macs_per_ns / spec.GEN2.partitions**2
        return {"DMA": self.bytes / plateau, "TensorE": pace * self.columns / rate}


def stretches(config: dict[str, Any], batch: int, call: Call) -> tuple[Stretch, Stretch, Stretch]:
    """Attention and MLP of one layer, and the head, of one rank."""
    hidden, d = config["hidden_size"], config["head_dim"]
    # where the degree does not divide the heads a rank computes padding, which no limit asks for
    q, kv = (config[f"num_{name}_heads"] / DEGREE for name in ("attention", "key_value"))
    f, vocabulary = config["intermediate_size"] // DEGREE, config["vocab_size"] // DEGREE
    pairs = call.tokens * (call.cached + (call.tokens + 1) / 2)
    moving = max(batch * call.tokens, 64)  # no pass takes less than 64

    def linear(n: float, k: float) -> Stretch:
        return Stretch(ITEM * n * k, n * k / 128**2 * moving)

    def joined(*parts: Stretch) -> Stretch:
        return Stretch(*(sum(values) for values in zip(*parts)))

    cache = 2 * ITEM * batch * kv * call.cached * d
    # scores move a column per pair and 128 rows of the array, of which D work; values D columns
    attention = batch * q * pairs / 128 * (1 + d / 128)
    passes = 2 * batch * q * pairs / 128
    return (
        joined(
            linear((q + 2 * kv) * d, hidden),
            linear(hidden, q * d),
            Stretch(cache, attention, passes),
        ),
        joined(linear(f, hidden), linear(f, hidden), linear(hidden, f)),
        Stretch(ITEM * vocabulary * hidden, vocabulary * hidden / 128**2 * max(64, batch)),
    )


class Limits(NamedTuple):
    """What no graph of these kernels is faster than, in nanoseconds, and the binding resource."""

    bound: float
    floor: float
    overlapped: float
    port: float
    binding: str


def floor(config: dict[str, Any], row: Row, plateau: float) -> Limits:
    """The limits of a row; ``plateau`` in bytes per nanosecond."""
    layers, over = config["num_hidden_layers"], cost.Overheads()
    totals, least, more, hidden_ns = {"DMA": 0.0, "TensorE": 0.0}, 0.0, 0.0, 0.0
    for call in calls(config, row):
        attention, mlp, head = stretches(config, row.batch, call)
        hidden = ITEM * row.batch * call.tokens * config["hidden_size"]
        before = over.collective(hidden, DEGREE)  # each stretch: of the one before or the embedding
        parts = [(layers, attention), (layers, mlp), (1, head)]
        least += over.graph_ns + (2 * layers + 1) * over.kernel_ns
        least += (2 * layers + 1) * over.cache_ns  # new keys and values, rows of the embedding
        for count, stretch in parts:
            paced = stretch.times(plateau, spec.GEN2.tensor_pace)
            stretch_ns = max(paced.values())
            least += count * (before + stretch_ns)
            beside = max(paced["DMA"], before + paced["TensorE"])
            hidden_ns += count * (before + stretch_ns - beside)
            more += count * max(0.0, stretch.port - stretch_ns)
            times = stretch.times(plateau)
            for name, time in times.items():
                totals[name] += count * time
        least += over.collective(ITEM * row.batch * config["vocab_size"], DEGREE)
    binding = max(totals, key=totals.__getitem__)
    return Limits(totals[binding], least, least - hidden_ns, least + more, binding)


def application(
    config: dict[str, Any], row: Row, module: Any = None, degree: int = DEGREE, **more: Any
) -> Any:
    """The model of a row as the driver configures it, on the meta device, of a ``module`` (the
    driver's choice); ``more`` settings of its NeuronConfig."""
    first = min(row.length, LONGEST_PREFILL) if row.phase == "prefill" else 64
    sizes: dict[str, Any] = {}
    for call in calls(config, row)[1:2]:  # the first chunk, if any
        sizes = dict(
            enable_bucketing=True,
            context_encoding_buckets=[first],
            token_generation_buckets=cache_buckets(first, row.length),
            speculation_length=call.tokens,
            prompt_in_chunks=True,
        )
    alone = row.length <= LONGEST_PREFILL and config["num_key_value_heads"] % degree == 0
    module = module or (llama if alone else models.extended)
    sizes |= dict(tp_degree=degree, batch_size=row.batch, max_context_length=first, **more)
    with tempfile.TemporaryDirectory() as folder:
        length = max(128, row.length)
        return tracing.application(module, config, Path(folder), seq_len=length, **sizes)


def estimate(
    config: dict[str, Any], row: Row, dma_profile: str, told: Callable[[str], object]
) -> tuple[float, int]:
    """(nanoseconds of all executions, traced instructions of the largest graph).

    `told` hears of each graph before it is traced.
    """
    model = application(config, row)
    wrappers = {wrapper.tag: wrapper for wrapper in model.models}
    estimator = Estimator(dma_profile, DEVICE_ALONE, DEGREE)
    known: dict[tuple[str, int], tuple[float, int]] = {}
    total = 0.0
    for call in calls(config, row):
        wrapper = wrappers[call.submodel]
        needed = min(call.cached + call.tokens, row.length)
        bucket = next(bucket for bucket in wrapper.neuron_config.buckets if bucket >= needed)
        key = call.submodel, bucket
        if key not in known:
            told(f"{row.name}: {call.submodel}, bucket {bucket}")
            events = events_of(tracing.record(model, wrapper, bucket, Path(tempfile.gettempdir())))
            graph = estimator.graph(*key, row.batch, events)
            programs = (event.program for event in events if event.program is not None)
            known[key] = graph.latency_ns, sum(len(program) for program in programs)
        total += known[key][0]
    return total, max(count for _, count in known.values())


class Measured(NamedTuple):
    """A row with its limits and its estimate, in nanoseconds."""

    row: Row
    limits: Limits
    time: float
    instructions: int

    @property
    def ratio(self) -> float:
        return self.time / self.limits.floor

    @property
    def cells(self) -> tuple[str, ...]:
        limits = self.limits
        return (
            self.row.name,
            f"{limits.bound / 1e6:.2f}",
            f"{limits.overlapped / 1e6:.3f}",
            f"{limits.floor / 1e6:.3f}",
            f"{limits.port / 1e6:.3f}",
            f"{self.time / 1e6:.3f}",
            f"{self.ratio:.3f}",
            f"{self.row.target:.2f}",
            limits.binding,
            f"{self.instructions:,}",
        )


COLUMNS = (
    "row", "bound, ms", "overlapped, ms", "floor, ms", "port, ms", "estimate, ms", "ratio",
    "target", "bound by", "instructions",
)  # fmt: skip


def measure(model: str, rows: Sequence[Row], dma_profile: str) -> list[Measured]:
    """The rows of one model, in order."""
    config, plateau = MODEL_SHAPES[model], cost.dma_profile(dma_profile).peak
    found = []
    for row in rows:
        limits = floor(config, row, plateau)
        with console.step(row.name, least_seconds=SHOWN_SECONDS) as step:
            time, count = estimate(config, row, dma_profile, step.note)
            step.note(row.name)
        found.append(Measured(row, limits, time, count))
    return found


def build_parser() -> Parser:
    parser = Parser(
        prog="-m lab.roofline",
        usage="%(prog)s [--model NAME] [--rows ROW [ROW ...] | --all] [--dma-profile NAME]",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", choices=sorted(MODEL_SHAPES), default=DEFAULT_MODEL)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS])
    which.add_argument("--all", action="store_true", help="every row of the table")
    parser.add_argument("--dma-profile", choices=list(cost.PROFILES), default=cost.DEFAULT_PROFILE)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    names = args.rows or [row.name for row in SHORT]
    wanted = [row for row in ROWS if args.all or row.name in names]
    table = Table(title=f"{args.model}, degree {DEGREE}, profile {args.dma_profile} (estimated)")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("row", "bound by") else "right")
    missed = False
    for row in wanted:
        try:
            (found,) = measure(args.model, [row], args.dma_profile)
        except CompileError as error:  # the driver would feed such a prompt in chunks
            missed = True
            print(f"{row.name}: {error}")
            continue
        missed |= found.ratio > found.row.target
        table.add_row(*found.cells)
    Console(width=max(130, Console().width)).print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
