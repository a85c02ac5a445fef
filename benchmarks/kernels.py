"""Simulated speed of llama.py's kernels on this CPU, as ratios against PyTorch in the same run.

    python benchmarks/kernels.py [--shape llama-3.2-1b] [--degree 2] [--tokens 64] [--past 128]

Times are this machine's wall clock of the simulator, not a device's. One layer and the head are
measured with seeded weights, in all ranks side by side as the stand-in runs them: a thread each, an
equal share of the cores, no collectives. A forward pass is layers times the layer plus the head.
Beside it stands Hugging Face's Llama in bf16 on all cores, eager, its layers of the same shape with
the weights of one.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import neuron_cpu

neuron_cpu.ensure_sdk()

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: E402

import llama  # noqa: E402
from harness import console  # noqa: E402
from harness.inputs.command_line import Parser  # noqa: E402
from neuron_cpu.console.arguments import positive  # noqa: E402

BF16 = torch.bfloat16


class Shape(NamedTuple):
    """Public model configuration."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int


SHAPES = {
    "smollm2-135m": Shape(30, 576, 9, 3, 64, 1536, 49152),
    "smollm2-360m": Shape(32, 960, 15, 5, 64, 2560, 49152),
    "tinyllama-1.1b": Shape(22, 2048, 32, 4, 64, 5632, 32000),
    "llama-3.2-1b": Shape(16, 2048, 32, 8, 64, 8192, 128256),
    "llama-3.2-3b": Shape(28, 3072, 24, 8, 128, 8192, 128256),
    "llama-3.1-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
}


def seconds(run: Callable[[], Any], repeat: int = 3) -> float:
    """Best of ``repeat`` runs after one that traces and warms up."""
    run()
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def of_all_ranks(run: Callable[[], Any], degree: int) -> float:
    """Seconds until every rank's thread has done ``run``, each with its share of the cores."""
    threads = max(1, torch.get_num_threads() // degree)
    with ThreadPoolExecutor(degree, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        return seconds(lambda: list(pool.map(lambda _: run(), range(degree))))


def measure(
    shape: Shape, degree: int, tokens: int, past: int, progress: Callable[[str], object]
) -> list[tuple[str, float, float]]:
    """(kernel, simulated seconds of all ranks, of one rank's products in PyTorch), seeded weights.

    Hidden sizes that are no whole tiles are rounded up, as the model pads them.
    """
    torch.manual_seed(0)
    shape = shape._replace(hidden=llama.whole_tiles(shape.hidden) * llama.P_MAX)
    d, f = shape.head_dim, shape.intermediate // degree
    heads = llama.HeadShape(shape.q_heads // degree, shape.kv_heads // degree, d)
    tiles = heads.stacks * heads.group
    norm = llama.Norm(shape.hidden, 1e-5)

    def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        plain = (torch.randn(n, k) * 0.02).to(BF16)
        return plain, llama.kernel_layout(plain)

    columns = (tiles + heads.stacks) * llama.P_MAX + heads.kv_heads * d
    qkv, out = weight(columns, shape.hidden), weight(shape.hidden, tiles * llama.P_MAX)
    gate, up, down = (weight(*size) for size in [(f, shape.hidden)] * 2 + [(shape.hidden, f)])

    def attention(x: torch.Tensor) -> Any:
        angles = torch.rand(llama.P_MAX, 1) * torch.arange(x.shape[1])
        tables = angles.cos().to(BF16), angles.sin().to(BF16)
        common = x, x, norm, qkv[1], out[1], *tables
        if x.shape[1] > 1:
            return lambda: llama.attention_prefill_kernel(*common, heads, 1)
        cache = torch.randn(1, heads.kv_heads, past, d).to(BF16)
        bias = torch.zeros(1, past, dtype=BF16)
        return lambda: llama.attention_decode_kernel(*common, cache, cache, bias, heads)

    result = []
    for phase, count in (("decode", 1), ("prefill", tokens)):
        progress(f"the kernels of a {phase}")
        x, context, inner = (
            torch.randn(count, k).to(BF16) for k in (shape.hidden, tiles * llama.P_MAX, f)
        )
        xt = x.t().contiguous()
        mlp_args = xt, xt, norm, gate[1], up[1], down[1]
        pairs = [
            ("attention", attention(xt), [(x, qkv), (context, out)]),
            ("mlp", lambda args=mlp_args: llama.swiglu_mlp_kernel(*args),
             [(x, gate), (x, up), (inner, down)]),
        ]  # fmt: skip
        for name, run, products in pairs:
            torch_time = seconds(lambda p=products: [a @ w[0].t() for a, w in p])
            result.append((f"{phase} {name}", of_all_ranks(run, degree), torch_time))
    progress("the head")
    x = torch.randn(1, shape.hidden).to(BF16)
    plain, blocked = weight(shape.vocabulary // degree, shape.hidden)
    run = lambda: llama.linear_kernel(x.t().contiguous(), blocked, norm)  # noqa: E731
    result.append(("head", of_all_ranks(run, degree), seconds(lambda: x @ plain.t())))
    return result


@torch.inference_mode()
def hugging_face(shape: Shape, tokens: int, past: int) -> dict[str, float]:
    """Seconds of a whole model's decode step after ``past`` tokens and of a prefill of ``tokens``.

    As for the kernels, one layer's weights serve all layers: none of them fits a cache of the CPU.
    """
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=1, num_attention_heads=shape.q_heads, head_dim=shape.head_dim,
        num_key_value_heads=shape.kv_heads, tie_word_embeddings=True, torch_dtype=BF16,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(BF16).eval()
    weights = model.model.layers[0].state_dict()
    for index in range(1, shape.layers):
        with torch.device("meta"):
            layer = LlamaDecoderLayer(config, index).eval()
        layer.load_state_dict(weights, assign=True)
        model.model.layers.append(layer)
    config.num_hidden_layers = shape.layers
    cache = DynamicCache()
    model(torch.zeros(1, past, dtype=torch.int64), past_key_values=cache)

    def decode() -> None:
        model(torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache)
        cache.crop(past)

    def prefill() -> None:
        hidden = model.model(torch.zeros(1, tokens, dtype=torch.int64))[0]
        model.lm_head(hidden[:, -1])  # one row; of [1, 1, H] PyTorch would copy the weight

    return {"decode": seconds(decode), "prefill": seconds(prefill)}


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = Parser(
        prog="benchmarks/kernels.py",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--degree", type=positive, default=2)
    parser.add_argument("--tokens", type=positive, default=64, help="of a prefill, at least 2")
    parser.add_argument("--past", type=positive, default=128, help="cached tokens of a decode step")
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    sizes = shape.q_heads, shape.kv_heads, shape.intermediate, shape.vocabulary
    if any(size % args.degree for size in sizes):
        parser.error(
            f"--degree must divide the {shape.q_heads} query heads and {shape.kv_heads} KV heads "
            f"of {args.shape}, and its other sizes, got {args.degree}; choose a divisor"
        )
    if args.tokens < 2:
        parser.error(f"--tokens must be at least 2, got {args.tokens}; one token is a decode step")
    return args


def main(argv: Optional[Sequence[str]] = None) -> int:
    args = parse(argv)
    shape = SHAPES[args.shape]
    with console.step("Measuring") as step:
        rows = measure(
            shape, args.degree, args.tokens, args.past, lambda what: step.note(f"Measuring {what}")
        )
        step.note("Measuring Hugging Face's model")
        whole = hugging_face(shape, args.tokens, args.past)
        step.note("Measuring")
    table = Table(title=f"{args.shape}, degree {args.degree} (measured on this CPU)")
    for column in ("kernel", "simulated ms", "PyTorch products ms", "ratio"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for name, ours, theirs in rows:
        table.add_row(name, f"{ours * 1e3:.1f}", f"{theirs * 1e3:.1f}", f"{ours / theirs:.2f}")
    screen = Console()
    screen.print(table)
    times = {name: ours for name, ours, _ in rows}
    for phase in ("decode", "prefill"):
        layer = times[f"{phase} attention"] + times[f"{phase} mlp"]
        total = shape.layers * layer + times["head"]
        screen.print(
            f"{phase}: {total:.2f} s for {args.degree} ranks ({shape.layers} layers and the head), "
            f"{total / whole[phase]:.2f} times Hugging Face in bf16 ({whole[phase]:.2f} s)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
