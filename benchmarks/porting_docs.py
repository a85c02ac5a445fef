"""Rewrites the times of docs/porting.md: the same kernels in both languages, on three chips.

    python benchmarks/porting_docs.py

Traces the kernels of llama.py and of llama_nki.py for one rank at tensor-parallel degree 2 and
schedules them with the cost model: estimated, nothing is measured. The first two columns are for
comparison, with a compiler that rearranges for both; today's leaves kernels in the order in which
they are written, as the others have it. Of trn2 and trn3 a kernel runs on one physical core; they
are uncalibrated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import neuron_cpu  # noqa: E402

neuron_cpu.ensure_sdk()

import torch  # noqa: E402

import llama  # noqa: E402
import llama_nki  # noqa: E402
from neuron_cpu.core.device import target  # noqa: E402
from neuron_cpu.core.time import schedule  # noqa: E402

PAGE = ROOT / "docs" / "porting.md"
BEGIN, END = "<!-- times: begin -->\n", "\n<!-- times: end -->"
CHIPS = ("trn1", "trn2", "trn3")
TOKENS = 640  # of a prompt, and in the cache of a decode step
# hidden size, query and KV heads, head dimension, features of the MLP and of the head, of one rank
SIZES = {
    "Llama-3.2-1B": (2048, 16, 4, 64, 4096, 64128),
    "Llama-3.2-3B": (3072, 12, 4, 128, 4096, 64128),
}


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def weight(n: int, k: int) -> torch.Tensor:
    return meta(128, llama.whole_tiles(n) * llama.whole_tiles(k) * 128)


def calls(module: ModuleType, size: tuple[int, ...]) -> Iterator[tuple[str, Any, tuple]]:
    """(name, kernel, arguments) of one layer and the head, in the classes of a module."""
    hidden, q, kv, d, features, vocabulary = size
    norm, heads = module.Norm(hidden, 1e-5), module.HeadShape(q, kv, d)
    projections = weight((q + 2 * kv) * d, hidden), weight(hidden, q * d)
    cache = meta(1, kv, TOKENS, d), meta(1, kv, TOKENS, d), meta(1, TOKENS)
    mlp = weight(features, hidden), weight(features, hidden), weight(hidden, features)
    for tokens, kind in ((TOKENS, "prefill"), (1, "decode")):
        common = meta(hidden, tokens), meta(hidden, tokens), norm
        attention = *common, *projections, meta(128, tokens), meta(128, tokens)
        more = (heads, 1) if tokens > 1 else (*cache, heads)
        kernel = getattr(module, f"attention_{kind}_kernel")
        yield f"attention, {kind}", kernel, (*attention, *more)
        yield f"MLP, {kind}", module.swiglu_mlp_kernel, (*common, *mlp)
    yield "norm and head", module.linear_kernel, (meta(hidden, 1), weight(vocabulary, hidden), norm)


def times(name: str) -> dict[str, list[float]]:
    """µs by kernel: of either file on trn1 alike, then of llama_nki.py on each chip of today."""
    found: dict[str, list[float]] = {}
    before = os.environ.get(target.ENVIRONMENT_VARIABLE)
    alike = schedule.COMPILER_ORDER
    columns = [("trn1", module, alike) for module in (llama, llama_nki)]
    columns += [(chip, llama_nki, None) for chip in CHIPS]
    try:
        for chip, module, order in columns:
            os.environ[target.ENVIRONMENT_VARIABLE] = chip
            for kernel, function, arguments in calls(module, SIZES[name]):
                total = schedule.schedule(function.trace(*arguments), order=order).total / 1e3
                found.setdefault(kernel, []).append(total)
    finally:
        os.environ.pop(target.ENVIRONMENT_VARIABLE)
        if before is not None:
            os.environ[target.ENVIRONMENT_VARIABLE] = before
    return found


def table() -> str:
    """The rows of the page."""
    head = ("Kernel", "`llama.py`, trn1", "`llama_nki.py` alike", "trn1, today", "trn2", "trn3")
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for name in SIZES:
        for kernel, figures in times(name).items():
            cells = [f"{name}: {kernel}", *(f"{figure:,.1f}" for figure in figures)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def published() -> dict[str, list[float]]:
    """The figures that the page has."""
    rows = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].splitlines()[2:]
    cells = [row.strip("| ").split(" | ") for row in rows]
    return {name: [float(figure.replace(",", "")) for figure in rest] for name, *rest in cells}


def write() -> None:
    """Put the table into the page."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    write()
