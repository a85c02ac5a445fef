"""Rewrites what docs/kernels.md shows in numbers and pictures.

    python benchmarks/kernel_docs.py

Traces the fused kernels of llama.py for Llama-3.2-1B at tensor-parallel degree 2, schedules them with
the cost model (estimated, nothing is measured) and draws docs/kernels.png.
"""  # noqa: E501

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import neuron_cpu  # noqa: E402

neuron_cpu.ensure_sdk()

import matplotlib  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402

import llama  # noqa: E402
from neuron_cpu.core import Program  # noqa: E402
from neuron_cpu.core.report import report  # noqa: E402
from neuron_cpu.core.time import cost, schedule  # noqa: E402

HIDDEN, Q, KV, D, F, VOCABULARY = 2048, 16, 4, 64, 4096, 64128  # one rank of Llama-3.2-1B
PROMPT, PAST = 640, 640
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(n: int, k: int) -> torch.Tensor:
    layout = llama.BlockLayout.of(n, k)
    return meta(layout.blocks, layout.block_size)


def programs() -> list[tuple[str, Program]]:
    """The fused kernels of one layer and the head, then the plain ones."""
    norm = meta(1, HIDDEN), 1e-5
    projections = weight((Q + 2 * KV) * D, HIDDEN), weight(HIDDEN, Q * D)
    mlp = weight(F, HIDDEN), weight(F, HIDDEN), weight(HIDDEN, F), F
    cache = meta(1, KV, PAST, D)
    bias = meta(1, PAST, dtype=torch.float32)

    def tables(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return meta(tokens, D // 2), meta(tokens, D // 2)

    prefill = llama.attention_prefill_block_kernel.trace(
        meta(PROMPT, HIDDEN), *norm, *projections, *tables(PROMPT), 1, Q, KV
    )
    decode = llama.attention_decode_block_kernel.trace(
        meta(1, HIDDEN), *norm, *projections, *tables(1), cache, cache, bias, Q, KV
    )
    return [
        (f"attention block, prefill of {PROMPT}", prefill),
        (f"MLP block, prefill of {PROMPT}",
         llama.swiglu_mlp_kernel.trace(meta(PROMPT, HIDDEN), *mlp, *norm)),
        (f"attention block, decode after {PAST}", decode),
        ("MLP block, decode", llama.swiglu_mlp_kernel.trace(meta(1, HIDDEN), *mlp, *norm)),
        ("norm and LM head", llama.linear_kernel.trace(
            meta(1, HIDDEN), weight(VOCABULARY, HIDDEN), VOCABULARY, *norm)),
        *plain(norm, projections, tables, (cache, cache, bias)),
    ]  # fmt: skip


def plain(norm: tuple, projections: tuple, tables: Callable, cache: tuple) -> list:
    """The kernels of single operators, for the same layer."""
    n, x = (Q + 2 * KV) * D, meta(PROMPT, HIDDEN)
    position, frequency = (meta(*shape, dtype=torch.float32) for shape in ((PROMPT, 1), (128, 32)))
    return [
        (f"RMSNorm of {PROMPT}", llama.rmsnorm_kernel.trace(x, *norm)),
        (f"norm and QKV projection of {PROMPT}",
         llama.linear_kernel.trace(x, projections[0], n, *norm)),
        (f"output projection of {PROMPT}",
         llama.linear_kernel.trace(meta(PROMPT, Q * D), projections[1], HIDDEN)),
        (f"RoPE tables of {PROMPT}",
         llama.rope_tables_kernel.trace(position, frequency, llama.nl.bfloat16)),
        (f"RoPE of {PROMPT}", llama.rope_kernel.trace(meta(PROMPT, Q * D), *tables(PROMPT))),
        (f"attention, prefill of {PROMPT}",
         llama.attention_prefill_kernel.trace(meta(PROMPT, n), *tables(PROMPT), 1, Q, KV)),
        (f"attention, decode after {PAST}",
         llama.attention_decode_kernel.trace(meta(1, n), *tables(1), *cache, Q, KV)),
    ]  # fmt: skip


def row(name: str, program: Program) -> str:
    profile = report.profile(schedule.schedule(program))
    figures = profile.metrics
    return (
        f"| {name} | {len(program):,} | {program.macs / 1e6:,.1f} "
        f"| {figures['hbm_read_bytes'] / 1e6:,.2f} | {figures['hbm_write_bytes'] / 1e6:,.2f} "
        f"| {figures['dma_transfer_average_bytes']:,.0f} "
        f"| {figures['sbuf_high_water_bytes'] / 1024:,.0f} "
        f"| {profile.time_ns / 1e3:,.0f} | {profile.binding.replace('|', '/')} |"
    )


def table() -> str:
    head = (
        "| Kernel | instructions | MACs, M | HBM read, MB | HBM written, MB | bytes a row "
        "| SBUF, KiB a partition | time, µs (estimated) | bound by |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---|"
    )
    return "\n".join([head, *(row(name, program) for name, program in programs())])


# --- picture --------------------------------------------------------------------------------------
COLOURS = {"hbm": "#cfe3f5", "sb": "#dff0d8", "psum": "#fbe3c8"}
STEPS = {
    "attention, prefill": [
        ("hbm", "x [T, H]"), ("sb", "RMSNorm\n[T, H]"), ("psum", "transpose\n[128, H/128, T]"),
        ("psum", "QKV product\n[T, (q+2kv)D]"), ("sb", "RoPE\nq, k"),
        ("psum", "scores\n[T, 512 keys]"), ("sb", "softmax\n[T, keys]"),
        ("psum", "weights x V\n[T, D]"), ("psum", "output product\n[T, H]"),
        ("hbm", "partial [T, H]\nk, v"),
    ],
    "attention, decode": [
        ("hbm", "x [B, H]"), ("sb", "RMSNorm\n[B, H]"), ("psum", "transpose\n[128, H/128, B]"),
        ("psum", "QKV product\n[D, heads, B]"), ("sb", "RoPE\n[D, heads]"),
        ("psum", "scores into slots\n[4 x 32, keys]"), ("sb", "softmax\n[128, keys]"),
        ("psum", "weights x V\n[128, D]"), ("psum", "output product\n[B, H]"),
        ("hbm", "partial [B, H]\nk, v"),
    ],
    "MLP block": [
        ("hbm", "x [T, H]"), ("sb", "RMSNorm\n[T, H]"), ("psum", "transpose\n[128, H/128, T]"),
        ("psum", "gate product\n[T, 512]"), ("psum", "up product\n[T, 512]"),
        ("sb", "SiLU x up\n[T, F]"), ("psum", "transpose\n[128, F/128, T]"),
        ("psum", "down product\n[T, 512]"), ("hbm", "partial [T, H]"),
    ],
    "norm and head": [
        ("hbm", "x [B, H]"), ("sb", "RMSNorm\n[B, H]"), ("psum", "transpose\n[128, H/128, B]"),
        ("psum", "head product\n[B, 512]"), ("hbm", "logits [B, V]"),
    ],
}  # fmt: skip


def draw(path: Path) -> None:
    """One row of boxes per fused kernel; colours say where each result lands."""
    figure, axes = plt.subplots(figsize=(19, 6.0))
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
    axes.set_xlim(-1.9, 14.6)
    axes.set_ylim(-5.9, 0.8)
    axes.axis("off")
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> int:
    page = ROOT / "docs" / "kernels.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
    draw(ROOT / "docs" / "kernels.png")
    print(f"{page.name} and kernels.png rewritten (DMA profile {cost.DEFAULT_PROFILE})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
