"""The times of lab/docs/porting.md: the same kernels in both languages, on three chips.

Traces the kernels of llama.py and of models/today.py for one rank at tensor-parallel degree 2 and
schedules them with the cost model: estimated, nothing is measured. The first two columns are for
comparison, with a compiler that rearranges for both; today's leaves kernels in the order in which
they are written, as the others have it. Of trn2 and trn3 a kernel runs on one physical core; they
are uncalibrated. A test holds how far both files are apart at other lengths.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import neuron_cpu

neuron_cpu.ensure_sdk()

import torch  # noqa: E402

import llama  # noqa: E402
import models.today  # noqa: E402
from lab import NOTES, pages  # noqa: E402
from neuron_cpu.core.device import target  # noqa: E402
from neuron_cpu.core.time import schedule  # noqa: E402
from neuron_cpu.environment import variable  # noqa: E402

PAGE = NOTES / "porting.md"
CHIPS = ("trn1", "trn2", "trn3")
TOKENS = 640  # of a prompt, and in the cache of a decode step
LENGTHS = (64, 128, 640, 1024, 2048)  # of the table of differences
# hidden size, query and KV heads, head dimension, features of the MLP and of the head, of one rank
SIZES = {
    "Llama-3.2-1B": (2048, 16, 4, 64, 4096, 64128),
    "Llama-3.2-3B": (3072, 12, 4, 128, 4096, 64128),
}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(n: int, k: int) -> torch.Tensor:
    return meta(128, llama.whole_tiles(n) * llama.whole_tiles(k) * 128)


def calls(
    module: ModuleType, size: tuple[int, ...], length: int = TOKENS
) -> Iterator[tuple[str, Any, tuple]]:
    """(name, kernel, arguments) of one layer and the head, in the classes of a module, for a prompt
    or a cache of so many tokens."""
    hidden, q, kv, d, features, vocabulary = size
    norm, heads = module.Norm(hidden, 1e-5), module.HeadShape(q, kv, d)
    projections = weight((q + 2 * kv) * d, hidden), weight(hidden, q * d)
    cache = meta(1, kv, length, d), meta(1, kv, length, d), meta(1, length)
    mlp = weight(features, hidden), weight(features, hidden), weight(hidden, features)
    for tokens, kind in ((length, "prefill"), (1, "decode")):
        common = meta(hidden, tokens), meta(hidden, tokens), norm
        attention = *common, *projections, meta(128, tokens), meta(128, tokens)
        more = (heads, 1) if tokens > 1 else (*cache, heads)
        kernel = getattr(module, f"attention_{kind}_kernel")
        yield f"attention, {kind}", kernel, (*attention, *more)
        yield f"MLP, {kind}", module.swiglu_mlp_kernel, (*common, *mlp)
    yield "norm and head", module.linear_kernel, (meta(hidden, 1), weight(vocabulary, hidden), norm)


def times(name: str) -> dict[str, list[float]]:
    """µs by kernel: of both files on trn1 alike, then of models/today.py on each chip of today."""
    found: dict[str, list[float]] = {}
    alike = schedule.COMPILER_ORDER
    columns: list[tuple[str, Any, str | None]]
    columns = [("trn1", module, alike) for module in (llama, models.today)]
    columns += [(each, models.today, None) for each in CHIPS]
    for each, module, order in columns:
        with variable(target.ENVIRONMENT_VARIABLE, each):
            for kernel, function, arguments in calls(module, SIZES[name]):
                total = schedule.schedule(function.trace(*arguments), order=order).total / 1e3
                found.setdefault(kernel, []).append(total)
    return found


def differences(name: str, length: int) -> dict[str, float]:
    """What models/today.py takes longer than llama.py, in %, by kernel whose time depends on the
    length of a prompt or a cache: on trn1, both rearranged."""
    found: dict[str, list[float]] = {}
    with variable(target.ENVIRONMENT_VARIABLE, "trn1"):
        for module in (llama, models.today):
            for kernel, function, arguments in calls(module, SIZES[name], length):
                if kernel in ("attention, prefill", "MLP, prefill", "attention, decode"):
                    program = function.trace(*arguments)
                    total = schedule.schedule(program, order=schedule.COMPILER_ORDER).total
                    found.setdefault(kernel, []).append(total)
    return {kernel: 100 * (new / old - 1) for kernel, (old, new) in found.items()}


def time_table() -> str:
    """µs of every kernel."""
    lines = ["| Kernel | `llama.py`, trn1 | `models/today.py` alike | trn1, today | trn2 | trn3 |"]
    lines.append(f"|---|{'---:|' * 5}")
    for name in SIZES:
        for kernel, figures in times(name).items():
            cells = " | ".join(f"{figure:,.1f}" for figure in figures)
            lines.append(f"| {name}: {kernel} | {cells} |")
    return "\n".join(lines)


def published() -> dict[str, list[float]]:
    """The figures that the page has."""
    rows = pages.published(PAGE, "times").splitlines()[2:]
    cells = [row.strip("| ").split(" | ") for row in rows]
    return {name: [float(figure.replace(",", "")) for figure in rest] for name, *rest in cells}
