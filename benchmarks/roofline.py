"""How far llama.py's estimated times are from what the chip's limits allow, row by row.

    python benchmarks/roofline.py [--model llama-3.2-1b] [--rows decode-640 prefill-640]

Nothing is measured: the whole graph is traced from shapes and scheduled by the cost model, for
tensor-parallel degree 2, and compared with

bound  the larger of weight and cache bytes over the DMA plateau (one core) and TensorE's cycles for
       the causal work, one moving column of 128 rows a cycle. Scores contract D rows, so a head
       dimension of 64 fills half of the array; the product with values fills it for any D.
floor  the same per stretch (attention, MLP, head), one after another, and what no kernel can hide:
       launches, the graph's start, collectives.

Exits with 1 where a row exceeds its target, the ratio of estimate and floor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from harness.inputs.model_shapes import MODEL_SHAPES  # noqa: E402
from neuron_cpu.core.device import spec  # noqa: E402
from neuron_cpu.core.time import cost  # noqa: E402

DEGREE = 2
ITEM = 2  # bytes of bf16


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
    *(Row("prefill", 1, length, 1.15) for length in (640, 1024, 2048)),
    Row("prefill", 1, 8192, 1.20),
]
DEFAULT = ("decode-128", "decode-640", "decode-2048", "decode-640x4", "prefill-64", "prefill-640")


class Stretch(NamedTuple):
    """One kernel between two collectives: HBM bytes, and columns that TensorE moves."""

    bytes: float
    columns: float

    def times(self, plateau: float) -> dict[str, float]:
        """Nanoseconds by resource; ``plateau`` in bytes per nanosecond."""
        rate = spec.GEN2.peak_macs_per_ns / spec.GEN2.partitions**2
        return {"DMA": self.bytes / plateau, "TensorE": self.columns / rate}


def stretches(config: dict[str, Any], row: Row) -> tuple[Stretch, Stretch, Stretch]:
    """Attention and MLP of one layer, and the head, of one rank."""
    hidden, d = config["hidden_size"], config["head_dim"]
    q, kv = (config[f"num_{name}_heads"] // DEGREE for name in ("attention", "key_value"))
    f, vocabulary = config["intermediate_size"] // DEGREE, config["vocab_size"] // DEGREE
    tokens = row.batch * (row.length if row.phase == "prefill" else 1)
    pairs = row.length * (row.length + 1) / 2 if row.phase == "prefill" else row.length + 1
    moving = max(tokens, 64) if row.phase == "decode" else tokens  # no pass takes less than 64

    def linear(n: int, k: int) -> Stretch:
        return Stretch(ITEM * n * k, n * k / 128**2 * moving)

    def joined(*parts: Stretch) -> Stretch:
        return Stretch(*(sum(values) for values in zip(*parts)))

    cache = 2 * ITEM * row.batch * kv * row.length * d if row.phase == "decode" else 0
    # scores move a column per pair and 128 rows of the array, of which D work; values D columns
    attention = row.batch * q * pairs / 128 * (1 + d / 128)
    return (
        joined(linear((q + 2 * kv) * d, hidden), linear(hidden, q * d), Stretch(cache, attention)),
        joined(linear(f, hidden), linear(f, hidden), linear(hidden, f)),
        Stretch(ITEM * vocabulary * hidden, vocabulary * hidden / 128**2 * max(64, row.batch)),
    )


def floor(config: dict[str, Any], row: Row, plateau: float) -> tuple[float, float, str]:
    """(bound, floor, binding resource) in nanoseconds."""
    layers, over = config["num_hidden_layers"], cost.Overheads()
    attention, mlp, head = stretches(config, row)
    parts = [(layers, attention), (layers, mlp), (1, head)]
    totals = {"DMA": 0.0, "TensorE": 0.0}
    least = over.graph_ns + (2 * layers + 1) * over.kernel_ns
    for count, stretch in parts:
        times = stretch.times(plateau)
        least += count * max(times.values())
        for name, time in times.items():
            totals[name] += count * time
    tokens = row.batch * (row.length if row.phase == "prefill" else 1)
    hidden = ITEM * tokens * config["hidden_size"]
    least += (2 * layers + 1) * over.collective(hidden, DEGREE)  # and the embedding's gather
    least += over.collective(ITEM * row.batch * config["vocab_size"], DEGREE)
    binding = max(totals, key=totals.__getitem__)
    return totals[binding], least, binding


def estimate(model: str, row: Row, dma_profile: str) -> tuple[float, int]:
    """(nanoseconds, traced instructions) of the row's whole graph, by ``--mode profile``."""
    context = row.length if row.phase == "prefill" else 64
    command = [
        sys.executable, str(ROOT / "main.py"), "--mode", "profile", "--enable-nki",
        "--profile-model", model, "--tp-degree", str(DEGREE), "--batch-size", str(row.batch),
        "--seq-len", str(max(128, row.length)), "--max-context-length", str(context),
        "--dma-profile", dma_profile,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run(
            [*command, "--profile-output", folder], capture_output=True, text=True
        )
        if made.returncode:
            raise SystemExit(f"{row.name} cannot be profiled: {made.stderr.strip()}")
        report = json.loads((Path(folder) / "profile.json").read_text(encoding="utf-8"))
    prefix = "context" if row.phase == "prefill" else "token"
    (graph,) = (g for g in report["graphs"] if g["submodel"].startswith(prefix))
    count = sum(
        op["count"] * op["profile"]["metrics"]["instruction_count"]
        for op in graph["operators"]
        if op["profile"] is not None
    )
    return graph["latency_ns"], int(count)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODEL_SHAPES), default="llama-3.2-1b")
    parser.add_argument("--rows", nargs="+", default=DEFAULT, choices=[r.name for r in ROWS])
    parser.add_argument("--all", action="store_true", help="every row of the table")
    parser.add_argument("--dma-profile", default=cost.DEFAULT_PROFILE)
    args = parser.parse_args()
    config = MODEL_SHAPES[args.model]
    plateau = cost.dma_profile(args.dma_profile).peak
    table = Table(title=f"{args.model}, degree {DEGREE}, profile {args.dma_profile} (estimated)")
    for column in (
        "row",
        "bound ms",
        "floor ms",
        "estimate ms",
        "ratio",
        "target",
        "bound by",
        "instructions",
    ):
        table.add_column(column, justify="left" if column in ("row", "bound by") else "right")
    missed = False
    for row in ROWS:
        if not args.all and row.name not in args.rows:
            continue
        bound, least, binding = floor(config, row, plateau)
        time, count = estimate(args.model, row, args.dma_profile)
        missed |= time > row.target * least
        table.add_row(
            row.name, f"{bound / 1e6:.2f}", f"{least / 1e6:.2f}", f"{time / 1e6:.2f}",
            f"{time / least:.3f}", f"{row.target:.2f}", binding, f"{count:,}",
        )  # fmt: skip
    Console().print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
