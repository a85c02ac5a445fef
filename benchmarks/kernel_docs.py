"""Rewrites what docs/kernels.md and docs/porting.md show in numbers and pictures.

    python benchmarks/kernel_docs.py [--check | --larger]

Traces the fused kernels of llama.py for Llama-3.2-1B at tensor-parallel degree 2, and the graphs of
benchmarks/roofline.py, schedules them with the cost model (estimated, nothing is measured) and
draws docs/kernels.png. ``--check`` writes nothing and exits with 1 where the table of the kernels
is not what they give; a test makes the graphs again, and fails where one takes 2 % longer.
``--larger`` rewrites the graphs of larger models and of prompts in chunks alone, in some minutes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import neuron_cpu  # noqa: E402

neuron_cpu.ensure_sdk()

import matplotlib  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402

import llama  # noqa: E402
from benchmarks import porting_docs, roofline  # noqa: E402
from harness import console  # noqa: E402
from harness.inputs.command_line import Parser  # noqa: E402
from neuron_cpu.core import Program  # noqa: E402
from neuron_cpu.core.report import report  # noqa: E402
from neuron_cpu.core.time import cost, schedule  # noqa: E402

HIDDEN, Q, KV, D, F, VOCABULARY = 2048, 16, 4, 64, 4096, 64128  # one rank of Llama-3.2-1B
PROMPT, PAST = 640, 640
PAGE = ROOT / "docs" / "kernels.md"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(n: int, k: int) -> torch.Tensor:
    return meta(llama.P_MAX, llama.whole_tiles(n) * llama.whole_tiles(k) * llama.P_MAX)


def programs() -> list[tuple[str, Program]]:
    """The kernels of one layer, in prefill and decode, and of the head."""
    heads, norm = llama.HeadShape(Q, KV, D), llama.Norm(HIDDEN, 1e-5)
    projections = weight((Q + 2 * KV) * D, HIDDEN), weight(HIDDEN, Q * D)
    mlp = weight(F, HIDDEN), weight(F, HIDDEN), weight(HIDDEN, F)

    def common(tokens: int) -> tuple[Any, ...]:
        return meta(HIDDEN, tokens), meta(HIDDEN, tokens), norm

    def attention(tokens: int) -> tuple[Any, ...]:
        return *common(tokens), *projections, meta(128, tokens), meta(128, tokens)

    cache = meta(1, KV, PAST, D), meta(1, KV, PAST, D), meta(1, PAST)
    return [
        (f"attention, prefill of {PROMPT}",
         llama.attention_prefill_kernel.trace(*attention(PROMPT), heads, 1)),
        (f"MLP, prefill of {PROMPT}", llama.swiglu_mlp_kernel.trace(*common(PROMPT), *mlp)),
        (f"attention, decode after {PAST}",
         llama.attention_decode_kernel.trace(*attention(1), *cache, heads)),
        ("MLP, decode", llama.swiglu_mlp_kernel.trace(*common(1), *mlp)),
        ("norm and LM head",
         llama.linear_kernel.trace(meta(HIDDEN, 1), weight(VOCABULARY, HIDDEN), norm)),
    ]  # fmt: skip


HEAD = (
    "Kernel", "instructions", "MACs, M", "HBM read, MB", "written, MB", "bytes a row",
    "SBUF, KiB a partition", "time, µs",
)  # fmt: skip


def row(name: str, program: Program, profile: report.Profile) -> str:
    figures = profile.metrics
    return (
        f"| {name} | {len(program):,} | {program.macs / 1e6:,.1f} "
        f"| {figures['hbm_read_bytes'] / 1e6:,.2f} | {figures['hbm_write_bytes'] / 1e6:,.2f} "
        f"| {figures['dma_transfer_average_bytes']:,.0f} "
        f"| {figures['sbuf_high_water_bytes'] / 1024:,.0f} | {profile.time_ns / 1e3:,.1f} |"
    )


def kernels() -> str:
    """A table of figures, and below it what bounds each kernel."""
    figures = [f"| {' | '.join(HEAD)} |", f"|---|{'---:|' * (len(HEAD) - 1)}"]
    bounds = []
    for name, program in programs():
        profile = report.profile(schedule.schedule(program))
        figures.append(row(name, program, profile))
        bound, _, _ = profile.binding.partition("; llama.py:")  # lines move with every change
        bounds.append(f"- {name} is bound by {bound}")
    return "\n".join([*figures, "", *bounds])


CHUNKS = [row for row in roofline.ROWS if row.name == "prefill-8192"]
LARGER = {  # tables that take minutes
    "chunks": (roofline.DEFAULT_MODEL, CHUNKS),
    "llama-3.2-3b": ("llama-3.2-3b", roofline.SHORT),
    # 2048 tokens of it make a graph of 1.9 million instructions, which is refused
    "llama-3.1-8b": ("llama-3.1-8b", [r for r in roofline.SHORT if r.name != "prefill-2048"]),
}


def graphs(model: str = roofline.DEFAULT_MODEL, rows: Sequence[roofline.Row] = ()) -> str:
    """Rows of the roofline, the short ones if none are given."""
    found = roofline.measure(model, rows or roofline.SHORT, cost.DEFAULT_PROFILE)
    rule = f"|---|{'---:|' * (len(roofline.COLUMNS) - 1)}"
    head, *rest = (
        f"| {' | '.join(cells)} |" for cells in (roofline.COLUMNS, *(each.cells for each in found))
    )
    return "\n".join([head, rule, *rest])


def markers(name: str) -> tuple[str, str]:
    """What stands before and behind a table of the page."""
    return f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"


def column(table: str, name: str) -> dict[str, float]:
    """Numbers of a column by the first cell of their rows."""
    lines = [line.strip("| ").split(" | ") for line in table.split("\n") if line.startswith("| ")]
    at = lines[0].index(name)
    return {cells[0]: float(cells[at].replace(",", "")) for cells in lines[1:]}


def published(name: str) -> str:
    """A table as the page has it."""
    begin, end = markers(name)
    return PAGE.read_text(encoding="utf-8").split(begin)[1].split(end)[0]


def publish(name: str, table: str) -> None:
    """Put a table into the page."""
    begin, end = markers(name)
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    PAGE.write_text(f"{before}{begin}{table}{end}{rest.split(end)[1]}", encoding="utf-8")


# --- picture --------------------------------------------------------------------------------------
COLOURS = {"hbm": "#cfe3f5", "sb": "#dff0d8", "psum": "#fbe3c8"}
STEPS = {
    "attention, prefill": [
        ("hbm", "x, delta\n[H, T]"), ("sb", "x + delta\n[128, H/128, T]"),
        ("psum", "Q, K product\n[128, T]"), ("psum", "RoPE\n[128, T]"),
        ("psum", "V product\n[T, kv D]"), ("psum", "scores\n[128 queries, keys]"),
        ("sb", "maxima\n[128 queries, 1]"), ("psum", "scores again\n[128 keys, queries]"),
        ("sb", "softmax weights\n[128 keys, queries]"),
        ("psum", "x (V, 1)\n[queries, D + 1]"), ("psum", "context, turned\n[128, tiles, T]"),
        ("psum", "output product\n[128, T]"), ("hbm", "partial [H, T]\nk, v"),
    ],
    "attention, decode": [
        ("hbm", "x, delta\n[H, B]"), ("sb", "x + delta\n[128, H/128, B]"),
        ("psum", "Q, K product\n[128, B]"), ("psum", "RoPE\n[128, B]"),
        ("sb", "Q block by block\n[128, slots, B heads]"), ("psum", "K, turned\n[128, keys]"),
        ("psum", "scores + mask\n[B heads, keys]"), ("sb", "softmax weights\n[B heads, keys]"),
        ("psum", "turned, x (V, 1)\n[heads, kv D + D]"), ("psum", "context, turned\n[128, B]"),
        ("psum", "output product\n[128, B]"), ("hbm", "partial [H, B]\nk, v"),
    ],
    "MLP": [
        ("hbm", "x, delta\n[H, T]"), ("sb", "x + delta\n[128, H/128, T]"),
        ("psum", "gate product\n[128, T]"), ("psum", "up product\n[128, T]"),
        ("sb", "/ rms, SiLU x up\n[128, F/128, T]"), ("psum", "down product\n[128, T]"),
        ("hbm", "partial\n[H, T]"),
    ],
    "norm and head": [
        ("hbm", "x [H, B]"), ("sb", "x\n[128, H/128, B]"), ("psum", "head product\n[128, B]"),
        ("hbm", "logits [B, V]"),
    ],
}  # fmt: skip


def draw(path: Path) -> None:
    """One row of boxes per fused kernel; colours say where each result lands."""
    figure, axes = plt.subplots(figsize=(22, 6.0))
    for at, (name, steps) in enumerate(STEPS.items()):
        y = -1.5 * at
        axes.text(-0.1, y, name, ha="right", va="center", fontsize=11, weight="bold")
        for k, (memory, text) in enumerate(steps):
            box = {"boxstyle": "round,pad=0.35", "facecolor": COLOURS[memory], "edgecolor": "#555"}
            axes.text(1.45 * k + 0.65, y, text, ha="center", va="center", fontsize=8, bbox=box)
            if k:
                axes.annotate(
                    "", (1.45 * k + 0.12, y), (1.45 * k - 0.25, y), arrowprops={"arrowstyle": "->"}
                )
    for k, (memory, label) in enumerate(
        (("hbm", "HBM"), ("sb", "SBUF"), ("psum", "PSUM, copied to SBUF"))
    ):
        box = {"boxstyle": "round", "facecolor": COLOURS[memory], "edgecolor": "#555"}
        axes.text(2.6 * k + 0.65, -5.6, label, ha="center", fontsize=9, bbox=box)
    axes.set_xlim(-1.9, 17.6)
    axes.set_ylim(-5.9, 0.8)
    axes.axis("off")
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = Parser(
        prog="benchmarks/kernel_docs.py",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--check", action="store_true", help="only say whether it is up to date")
    kinds.add_argument("--larger", action="store_true", help="only larger models' graphs")
    args = parser.parse_args(argv)
    if args.check:
        with console.step("Tracing the kernels", least_seconds=roofline.SHOWN_SECONDS):
            outdated = published("kernels") != kernels()
        if outdated:
            print(f"{PAGE} is out of date; run python benchmarks/kernel_docs.py")
        return int(outdated)
    if args.larger:
        for name, rows in LARGER.items():
            publish(name, graphs(*rows))
        print(f"{PAGE.name} rewritten (DMA profile {cost.DEFAULT_PROFILE})")
        return 0
    with console.step("Tracing the kernels", least_seconds=roofline.SHOWN_SECONDS):
        publish("kernels", kernels())
    publish("graphs", graphs())
    with console.step("Drawing, and tracing both languages"):
        draw(PAGE.with_suffix(".png"))
        porting_docs.write()
    pages = f"{PAGE.name}, kernels.png and {porting_docs.PAGE.name}"
    print(f"{pages} rewritten (DMA profile {cost.DEFAULT_PROFILE})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
