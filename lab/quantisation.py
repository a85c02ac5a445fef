"""Rewrites the tables of lab/docs/quantisation.md: what weights and caches of one byte bring.

    python -m lab.quantisation

A decode step of Llama-3.2-1B at tensor-parallel degree 2 and cache 640 is estimated by
`main.py --mode profile`, the attention kernel of one layer over long caches by the same cost model.
Perplexity is measured by `main.py --mode perplexity` on the embedded model. Some five minutes.
"""

import re
import subprocess
import sys

import neuron_cpu

neuron_cpu.ensure_sdk()

import torch  # noqa: E402

import llama  # noqa: E402
import models.cached  # noqa: E402
from lab import NOTES, ROOT, pages  # noqa: E402
from lab.porting_docs import SIZES, meta, weight  # noqa: E402
from neuron_cpu.core.time import schedule  # noqa: E402

PAGE = NOTES / "quantisation.md"
HIDDEN, Q, KV, D, *_ = SIZES["Llama-3.2-1B"]
CACHES = [(keys, batch) for keys in (8192, 32768, 131072) for batch in (1, 4)]
WEIGHTS = {"bf16": (), "int8": ("--quantize", "int8"), "fp8": ("--quantize", "fp8")}
STEP = re.compile(r"token_generation_model, bucket 640.* ([\d.]+) ms a token")
PERPLEXITY = re.compile(r"^(bfloat16|int8|f8e4m3) weights.*?([\d.]+) +(-|[+-][\d.]+%) +\d+$", re.M)


def driver(*arguments: str) -> str:
    """Standard output of main.py."""
    command = [sys.executable, str(ROOT / "main.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def step_ms(*flags: str) -> float:
    """Estimated time of a decode step with kernels."""
    shape = ("--profile-model", "llama-3.2-1b", "--tp-degree", "2", "--seq-len", "640")
    short = ("--max-context-length", "64")  # of a prefill, which is not looked at
    text = driver("--mode", "profile", "--enable-nki", *shape, *short, *flags)
    found = STEP.search(text)
    if found is None:
        raise SystemExit(f"No estimate of a decode step in:\n{text}")
    return float(found[1])


def attention_us(cache: torch.dtype, keys: int, batch: int = 1) -> float:
    """Estimated time of one layer's attention of a token of each sequence over so many cached keys,
    weights in bf16."""
    heads, norm = llama.HeadShape(Q, KV, D), llama.Norm(HIDDEN, 1e-5)
    weights = weight((Q + 2 * KV) * D, HIDDEN), weight(HIDDEN, Q * D)
    hidden, angles = meta(HIDDEN, batch), meta(128, batch)
    cached = [meta(batch, KV, keys, D, dtype=cache)] * 2
    given = hidden, hidden, norm, *weights, angles, angles, *cached
    program = models.cached.attention_chunk_kernel.trace(*given, meta(batch, keys), None, heads)
    return schedule.schedule(program).total / 1e3


def table() -> str:
    perplexities = PERPLEXITY.findall(driver("--mode", "perplexity", "--no-enable-nki"))
    if len(perplexities) != len(WEIGHTS):
        raise SystemExit(f"Expected {len(WEIGHTS)} perplexities, got {perplexities}.")
    steps = {name: step_ms(*flags) for name, flags in WEIGHTS.items()}
    rows = [
        "| Weights | Decode step, ms (estimated) | of bf16 | Perplexity | against bf16 |",
        "|---|---|---|---|---|",
    ]
    for (name, ms), (_, perplexity, above) in zip(steps.items(), perplexities):
        rows.append(f"| {name} | {ms:.3f} | {ms / steps['bf16']:.3f} | {perplexity} | {above} |")
    rows += [
        "",
        "| Cached keys | Sequences | bf16, MiB | of a layer, µs | fp8, MiB | µs | of bf16 |",
        "|---|---|---|---|---|---|---|",
    ]
    for keys, batch in CACHES:
        mib = 2 * batch * KV * keys * D / 2**20
        bf16, fp8 = (attention_us(d, keys, batch) for d in (torch.bfloat16, torch.float8_e4m3fn))
        sizes = f"{2 * mib:.0f} | {bf16:.1f} | {mib:.0f} | {fp8:.1f}"
        rows.append(f"| {keys} | {batch} | {sizes} | {fp8 / bf16:.3f} |")
    return "\n".join(rows)


def main() -> int:
    made = table()
    print(made)
    pages.publish(PAGE, "quantisation", made)
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
