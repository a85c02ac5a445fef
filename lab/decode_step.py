"""A decode step as one kernel (models/step.py) beside the 33 kernels of llama.py.

    python -m lab.decode_step [--rows ROW ...] [--write]

Nothing is measured: graphs are traced from shapes and timed by the cost model. `bound` is bytes of
weights and cached keys over the DMA plateau. Both graphs are whole: launch, embedding, kernels,
collectives, update of the caches, logits; what the host does is in neither. A launch of a kernel
takes 2 us, or 210 with the compiler of SDK 2.32 (lab/docs/cost_model.md); a collective 10 or 26 us.
Columns are named call + collective; the first four are one kernel, the next 33. The ratio is that
of one kernel at 2 us and at the collective of the model of time (trn1 26 us, trn2 12) to the bound.
`--write` puts the table and the stream of a layer into lab/docs/decode_step.md.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

import neuron_cpu

neuron_cpu.ensure_sdk()

import llama  # noqa: E402
import models.step  # noqa: E402
from harness.figures import tracing  # noqa: E402
from harness.figures.estimate import Estimator, events_of  # noqa: E402
from harness.figures.graphs import DECODE  # noqa: E402
from harness.model_shapes import MODEL_SHAPES  # noqa: E402
from lab import NOTES, pages, roofline  # noqa: E402
from neuron_cpu.core.device import spec, target  # noqa: E402
from neuron_cpu.core.time import cost  # noqa: E402
from neuron_cpu.core.time.schedule import ENGINES, Schedule  # noqa: E402

PAGE = NOTES / "decode_step.md"
LAUNCHES = (2_000.0, 210_000.0)  # ns of a kernel's call, by compiler
COLLECTIVES = (10_000.0, 26_000.0)
COSTS = [(call, collective) for collective in COLLECTIVES for call in LAUNCHES]
SUBMODEL = "speculation_model"


class Row(NamedTuple):
    """Sizes of a step: ``each`` new tokens of a sequence, physical cores of a rank."""

    chip: str
    model: str
    degree: int
    batch: int
    keys: int
    each: int = 1
    cores: int = 1

    @property
    def name(self) -> str:
        more = f" x{self.batch}" if self.batch > 1 else ""
        more += f", {self.each} new" if self.each > 1 else ""
        more += ", 2 cores" if self.cores > 1 else ""
        return f"{self.chip} {self.model.split('-')[-1]}/{self.degree}, {self.keys}{more}"


ONE_B, THREE_B, EIGHT_B = "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"
CHIPS = "trn1", "trn2"
ROWS = [
    *(Row(chip, ONE_B, 2, 1, keys) for keys in (640, 128, 2048) for chip in CHIPS),
    *(Row(chip, ONE_B, 2, 1, 640, each) for each in (8, 4) for chip in CHIPS),
    *(Row("trn2", ONE_B, degree, 1, 640, cores=2) for degree in (4, 2)),
    *(Row(chip, ONE_B, 2, batch, 640) for batch in (8, 4) for chip in CHIPS),
    *(Row(chip, THREE_B, 2, 1, 640) for chip in CHIPS),
    *(Row(chip, EIGHT_B, 8, 1, 640) for chip in CHIPS),
]


def bound_ns(row: Row) -> float:
    """Bytes of weights and cached keys of a rank over the plateau of its cores in `nki`."""
    c, d = MODEL_SHAPES[row.model], MODEL_SHAPES[row.model]["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    layer = c["hidden_size"] * (2 * q + 2 * kv + 3 * c["intermediate_size"])
    layer += 2 * row.batch * kv * row.keys
    whole = c["num_hidden_layers"] * layer + c["vocab_size"] * c["hidden_size"]
    with spec.using(target.TARGETS[row.chip]):
        plateau = cost.in_language(cost.dma_profile(cost.DEFAULT_PROFILE), today=True).peak
    return roofline.ITEM * whole / row.degree / plateau / row.cores


def graph_of(row: Row, module: Any) -> list[tuple[str, Any]]:
    """What one rank runs in a step of the model in ``module``."""
    os.environ[target.ENVIRONMENT_VARIABLE] = row.chip
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = str(row.cores)
    more = dict(speculation_length=row.each) if row.each > 1 else {}
    wanted = roofline.Row("decode", row.batch, row.keys, 0.0)
    model = roofline.application(MODEL_SHAPES[row.model], wanted, module, row.degree, **more)
    wrapper = {w.tag: w for w in model.models}[SUBMODEL if more else DECODE]
    bucket = min(b for b in wrapper.neuron_config.buckets if b >= row.keys)
    return events_of(tracing.record(model, wrapper, bucket, Path(tempfile.gettempdir())))


def times(row: Row, module: Any) -> tuple[dict[tuple[float, float], float], int, Schedule]:
    """Of a step of the model in ``module``: nanoseconds by what a call and a collective take, the
    chip's own last; how many kernels it has, and the schedule of the last one."""
    events, found = graph_of(row, module), {}
    programs = [event.program for _, event in events if event.program is not None]
    for collective in (*COLLECTIVES, target.TARGETS[row.chip].collective_ns):
        for program in programs:
            program.core = replace(program.core, collective_ns=collective)
        costs = cost.Overheads(
            collective_ns=collective, host_ns=0.0, logits_ns=0.0, argmax_ns=0.0, kernel_ns=0.0
        )
        order: Any = None  # each language's own
        estimator = Estimator(cost.DEFAULT_PROFILE, costs, row.degree, order)
        made = estimator.graph(DECODE, row.keys, row.batch, events)
        for launch in LAUNCHES:
            found[launch, collective] = made.latency_ns + len(programs) * launch
    return found, len(programs), made.schedules[-1]


def table(rows: Sequence[Row], keep: bool) -> None:
    """Print a row after another, and the stream of a layer of the first one over 640 keys; ``keep``
    them on the page."""
    heads = [f"{call / 1e3:g}+{each / 1e3:g}" for call, each in COSTS] * 2
    lines = [f"| Step | bound | {' | '.join(heads)} | ratio |", "|---|" + "---:|" * 10]
    drawn: list[str] = []
    for row in rows:
        bound, (one, _, schedule) = bound_ns(row), times(row, models.step)
        cells = [f"{one[at] / 1e6:.2f}" for at in COSTS]
        if row.each == row.cores == row.batch == 1 and row.keys == 640:
            many, _, _ = times(row, llama)
            cells += [f"{many[at] / 1e6:.2f}" for at in COSTS]
        cells += [""] * (len(heads) - len(cells))
        ratio = one[LAUNCHES[0], target.TARGETS[row.chip].collective_ns] / bound
        lines.append(f"| {row.name} | {bound / 1e6:.2f} | {' | '.join(cells)} | {ratio:.3f} |")
        print(lines[-1], flush=True)
        if not drawn and row.keys == 640:
            drawn = ["```text", *stream(schedule, 8), "```"]
        if keep:
            pages.publish(PAGE, "times", "\n".join(lines))
            pages.publish(PAGE, "stream", "\n".join(drawn))
    print("\n".join(drawn))


# --- The stream of a layer ------------------------------------------------------------------------
COLUMN_NS = 4_000.0
SHADES = " .:+#"


def stream(made: Schedule, layer: int) -> list[str]:
    """A layer in columns of 4 µs: what arrives, which collective runs, how busy engines are."""
    code = made.program.instructions
    names = ["=" if i.op.name == "collective" else ENGINES[e] for i, e in zip(code, made.engine)]
    meetings = [at for at, i in enumerate(code) if getattr(i.attrs, "kind", "") == "all_reduce"]
    begin, end = made.end[meetings[2 * layer - 1]], made.end[meetings[2 * layer + 1]]
    columns = int((end - begin) / COLUMN_NS) + 1

    def shares(spans: Any) -> list[dict[Any, float]]:
        found: list[dict[Any, float]] = [{} for _ in range(columns)]
        for key, first, last in spans:
            reach = (int((time - begin) / COLUMN_NS) for time in (first, last))
            for n in range(max(0, next(reach)), min(columns - 1, next(reach)) + 1):
                time = min(last - begin, (n + 1) * COLUMN_NS) - max(first - begin, n * COLUMN_NS)
                found[n][key] = found[n].get(key, 0.0) + max(0.0, time)
        return found

    lanes = [span[1:] for span in made.lane_spans() if span[0] == 0 and names[span[1]] != "="]
    # the first letter of what a transfer brings: of the layer as a capital
    sources = [code[at].src[0].storage.name or "-" for at, *_ in lanes]
    letters = [n[0].upper() if n.endswith(f"_{layer}") else n[0] for n in sources]
    arriving = shares((key, *span) for key, (_, *span) in zip(letters, lanes))
    busy = shares(zip(names, made.start, made.end))
    lines = ["arrives    " + "".join(max(a, key=a.__getitem__) if a else " " for a in arriving)]
    lines.append("collective " + "".join("=" if column.get("=") else " " for column in busy))
    for engine in (engine for engine in spec.Engine if engine is not spec.Engine.DMA):
        levels = [min(1.0, column.get(engine, 0.0) / COLUMN_NS) for column in busy]
        lines.append(f"{engine.value:10} " + "".join(SHADES[round(4 * n)] for n in levels))
    return [line.rstrip() for line in lines]


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS])
    parser.add_argument("--write", action="store_true", help="into lab/docs/decode_step.md")
    args = parser.parse_args(argv)
    table([row for row in ROWS if not args.rows or row.name in args.rows], args.write)
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
