"""A decode step as one kernel (models/step.py) beside the 33 kernels of llama.py.

    python -m lab.decode_step [--rows ROW ...] [--write]

Nothing is measured: graphs are traced from shapes and timed by the cost model. `bound` is bytes of
weights and cached keys over the DMA plateau. Both graphs are whole: launch, embedding, kernels,
collectives, update of the caches, logits; what the host does is in neither. The ratio is that of
one kernel to the bound. `--write` puts the table into lab/docs/decode_step.md.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

PAGE = NOTES / "decode_step.md"
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
    *(Row(chip, ONE_B, 2, 1, 640, 8) for chip in CHIPS),
    *(Row("trn2", ONE_B, degree, 1, 640, cores=2) for degree in (4, 2)),
    *(Row(chip, ONE_B, 2, 8, 640) for chip in CHIPS),
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


def graph_of(row: Row, module: Any) -> list[Any]:
    """What one rank runs in a step of the model in ``module``."""
    os.environ[target.ENVIRONMENT_VARIABLE] = row.chip
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = str(row.cores)
    more = dict(speculation_length=row.each) if row.each > 1 else {}
    wanted = roofline.Row("decode", row.batch, row.keys, 0.0)
    model = roofline.application(MODEL_SHAPES[row.model], wanted, module, row.degree, **more)
    wrapper = {w.tag: w for w in model.models}[SUBMODEL if more else DECODE]
    bucket = min(b for b in wrapper.neuron_config.buckets if b >= row.keys)
    return events_of(tracing.record(model, wrapper, bucket, Path(tempfile.gettempdir())))


def milliseconds(row: Row, module: Any) -> tuple[float, int]:
    """Of a step of the model in ``module``, and how many kernels it has."""
    events = graph_of(row, module)
    order: Any = None  # each language's own
    estimator = Estimator(cost.DEFAULT_PROFILE, roofline.DEVICE_ALONE, row.degree, order)
    kernels = sum(event.program is not None for event in events)
    return estimator.graph(DECODE, row.keys, row.batch, events).latency_ns / 1e6, kernels


def table(rows: Sequence[Row]) -> str:
    """Markdown: a row a step, printed as soon as it is there."""
    lines = ["| Step | bound, ms | one kernel | `llama.py` | its kernels | ratio |"]
    lines.append("|---|" + "---:|" * 5)
    for row in rows:
        bound, (one, _) = bound_ns(row) / 1e6, milliseconds(row, models.step)
        cells = [f"{bound:.2f}", f"{one:.2f}", "", "", f"{one / bound:.3f}"]
        if row.each == row.cores == row.batch == 1 and row.keys == 640:
            many, kernels = milliseconds(row, llama)
            cells[2:4] = f"{many:.2f}", f"{kernels}"
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS])
    parser.add_argument("--write", action="store_true", help="into lab/docs/decode_step.md")
    args = parser.parse_args(argv)
    made = table([row for row in ROWS if not args.rows or row.name in args.rows])
    if args.write:
        pages.publish(PAGE, "times", made)
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
