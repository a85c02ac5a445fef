"""Estimated times of the 2026 contest's model, Qwen3-30B-A3B at degree 4, in one run by one ruler.

    python -m lab.contest_2026 [--target trn2 trn3] [--entry FILE ...] [--write]

Nothing is measured. The graphs of the stand-in's baseline, of qwen3_moe.py and of each --entry (the
winner's upload is one) are traced from shapes and scheduled, with two and with four layers; each of
the 48 takes half of the difference, so that a kernel of all layers counts as it would.
A prompt's graph is that of its bucket. The floor is the bytes that a graph has to read over the
share of HBM's rate that a logical core has: weights of attention, of the router, of the chosen
experts (of a prompt all) and of the head. Scores are the contest's formula of these estimates and
of its published base times. --write puts the table into lab/docs/qwen3_moe.md.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("NEURON_CPU_NXDI", "0.9")

import neuron_cpu

neuron_cpu.ensure_sdk()

import torch  # noqa: E402
from neuronx_distributed_inference.models.config import MoENeuronConfig  # noqa: E402
from neuronx_distributed_inference.models.qwen3_moe import modeling_qwen3_moe  # noqa: E402
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config  # noqa: E402

from harness.figures import tracing  # noqa: E402
from harness.figures.estimate import COLLECTIVE, Estimator, events_of  # noqa: E402
from harness.figures.graphs import DECODE, PREFILL  # noqa: E402
from harness.inputs import submission  # noqa: E402
from lab import NOTES, ROOT, pages  # noqa: E402
from neuron_cpu.core.device.spec import GEN3, GEN4, NeuronCore, using  # noqa: E402
from neuron_cpu.core.time import cost  # noqa: E402

DEGREE, CORES, LAYERS, TRACED, LENGTH = 4, 2, 48, (2, 4), 640
CONFIG: dict[str, Any] = dict(
    model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], hidden_size=2048,
    intermediate_size=6144, moe_intermediate_size=768, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    norm_topk_prob=True, vocab_size=151936, max_position_embeddings=40960, rope_theta=1e6,
    rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False, mlp_only_layers=[],
    decoder_sparse_step=1, bos_token_id=151643, eos_token_id=151645, torch_dtype="bfloat16",
)  # fmt: skip
GENERATIONS = {"trn2": GEN3, "trn3": GEN4}
# What a row is: sub-model, bucket, and the prompts of the contest that run it.
ROWS = (
    (DECODE, LENGTH, "decode step"),
    (PREFILL, 128, "prompts of 18 and 126"),
    (PREFILL, LENGTH, "prompt of 402"),
)
# Tokens in, base latency in ms and base throughput of the five public prompts
# (aws-neuron/nki-moe f742418, prompt_data_trn2.csv and prompt_data_trn3.csv).
PROMPTS = {
    "trn2": (
        (18, 12498.0, 51.86), (126, 9432.19, 70.24), (43, 12089.08, 54.40),
        (10, 12868.67, 50.89), (402, 3041.92, 217.74),
    ),
    "trn3": (
        (18, 17138.28, 37.87), (126, 12427.41, 52.34), (43, 16208.29, 40.25),
        (10, 17177.15, 37.93), (402, 3871.62, 168.39),
    ),
}  # fmt: skip
PAGE = NOTES / "qwen3_moe.md"
Estimate = tuple[list[tuple[float, ...]], float]


def floor_ns(core: NeuronCore, submodel: str) -> float:
    """Bytes that one rank has to read, over its share of HBM's rate."""
    hidden, inner = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
    heads = 2 * (CONFIG["num_attention_heads"] + CONFIG["num_key_value_heads"]) // DEGREE
    experts = CONFIG["num_experts_per_tok" if submodel == DECODE else "num_experts"]
    layer = heads * CONFIG["head_dim"] + CONFIG["num_experts"] + experts * 3 * inner // DEGREE
    read = 2 * hidden * (LAYERS * layer + CONFIG["vocab_size"] // DEGREE)
    return read / (CORES * core.hbm_bytes_per_ns)


def application(module: Any, folder: str, layers: int) -> Any:
    """A model of so many layers on the meta device, as the contest's driver configures it."""
    model_cls = module.NeuronQwen3MoeForCausalLM
    config_cls = model_cls.get_config_cls()
    neuron_config = config_cls.get_neuron_config_cls()(
        qwen="",
        tp_degree=DEGREE,
        seq_len=LENGTH,
        max_context_length=LENGTH,
        max_length=LENGTH,
        enable_bucketing=True,
        torch_dtype=torch.bfloat16,
        logical_nc_config=CORES,
        blockwise_matmul_config={"use_torch_block_wise": True},
    )
    config = config_cls(neuron_config, load_config=load_pretrained_config(folder))
    config.num_hidden_layers = layers
    return model_cls(folder, config)


def traced(module: Any, folder: str, layers: int) -> list[tuple[float, ...]]:
    """Of a model of so many layers: (nanoseconds of a graph, of which collectives) of each row, and
    (MACs, of which in kernels) of the first bucket of both sub-models."""
    costs, found, macs = cost.Overheads(host_ns=0.0, logits_ns=0.0, argmax_ns=0.0), [], [0, 0]
    model = application(module, folder, layers)
    wrappers = {wrapper.tag: wrapper for wrapper in model.models}

    firsts = [(name, wrappers[name].neuron_config.buckets[0]) for name in (PREFILL, DECODE)]
    events = {
        (name, bucket): events_of(tracing.record(model, wrappers[name], bucket, Path(folder)))
        for name, bucket in {*firsts, *(row[:2] for row in ROWS)}
    }
    for submodel, bucket, _ in ROWS:
        estimator = Estimator(cost.DEFAULT_PROFILE, costs, DEGREE)
        graph = estimator.graph(submodel, bucket, 1, events[submodel, bucket])
        together = sum(time for kind, _, _, time in graph.steps if kind == COLLECTIVE)
        for made in graph.schedules:  # those inside of kernels
            code = zip(made.program.instructions, made.busy)
            together += sum(time for i, time in code if i.op.name == "collective")
        found.append((graph.latency_ns, together))
    for event in events[firsts[0]] + events[firsts[1]]:
        macs[0] += event.macs
        macs[1] += event.macs * (event.program is not None)
    return [*found, tuple(macs)]


def estimate(path: Path | None, core: NeuronCore) -> Estimate:
    """Of an entry's file (None: the baseline), (nanoseconds of a graph, of which collectives) of
    each row, and the share of MACs in kernels that the contest's driver counts."""
    with tempfile.TemporaryDirectory() as name, using(core):
        (Path(name) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        # an entry may put a constructor of its own into the SDK's class
        with mock.patch.object(MoENeuronConfig, "__init__", MoENeuronConfig.__init__):
            module = modeling_qwen3_moe if path is None else submission.load(path, "qwen3_moe")
            few, more = (traced(module, name, layers) for layers in TRACED)
    times = (LAYERS - TRACED[0]) / (TRACED[1] - TRACED[0])  # the difference comes on top
    pairs = [zip(*pair) for pair in zip(few, more)]
    *rows, (macs, inside) = [tuple(a + (b - a) * times for a, b in pair) for pair in pairs]
    return rows, inside / macs


def score(target: str, entry: Estimate) -> tuple[float, float]:
    """(seconds of the first prompt, score of all five) by the contest's formula, accuracy 1.

    Each prompt is one prompt's graph and steps up to LENGTH tokens, with the ruler's host work.
    """
    host = cost.Overheads().step_ns() - cost.Overheads().graph_ns
    ((step, _), (short, _), (long, _)), share = entry
    total, seconds = 0.0, []
    for tokens, base_ms, base_rate in PROMPTS[target]:
        prompt = short if tokens <= ROWS[1][1] else long
        seconds.append((prompt + host + (LENGTH - tokens) * (step + host)) / 1e9)
        faster = base_ms / 1e3 / seconds[-1] * (LENGTH / seconds[-1]) / base_rate
        total += faster * (1 + share)
    return seconds[0], total


def table(targets: Sequence[str], entries: Sequence[Path]) -> str:
    """All rows as Markdown, milliseconds."""
    files = {"baseline": None, "qwen3_moe.py": ROOT / "models" / "qwen3_moe.py"}
    files |= {f"{path.absolute().parent.name}/{path.stem}": path for path in entries}
    heads = ["ms (in brackets collectives)", "floor", *files]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (1 + len(files)) + "|"]
    for target in targets:
        with mock.patch.dict(os.environ, {"NEURON_PLATFORM_TARGET_OVERRIDE": target}):
            columns = [estimate(path, GENERATIONS[target]) for path in files.values()]
        for at, (submodel, _, words) in enumerate(ROWS):
            rows = [column[at] for column, _ in columns]
            cells = [f"{total / 1e6:.2f} ({part / 1e6:.1f})" for total, part in rows]
            floor = floor_ns(GENERATIONS[target], submodel) / 1e6
            lines.append(f"| {target}, {words} | {floor:.2f} | {' | '.join(cells)} |")
        scores = [score(target, column) for column in columns]
        cells = [f"{total:.1f} ({share:.2f})" for (_, total), (_, share) in zip(scores, columns)]
        lines.append(f"| {target}, score of five prompts (share of NKI) | | {' | '.join(cells)} |")
        cells = [f"{seconds:.2f}" for seconds, _ in scores]
        lines.append(f"| {target}, first prompt, seconds | | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", nargs="+", choices=list(GENERATIONS), default=list(GENERATIONS))
    parser.add_argument("--entry", nargs="*", type=Path, default=[])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    made = table(args.target, args.entry)
    print(made)
    if args.write:
        pages.publish(PAGE, "times", made)
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
