"""What collectives between rank threads cost a decode step, as a share of the step.

    python benchmarks/collectives.py [--layers 30 --hidden 576 --tp-degree 2 --steps 50]

Builds a random Llama of the embedded model's shape (nine query heads padded to ten at degree 2)
and decodes with the baseline, in turns with the ranks meeting in every collective and with the
same arithmetic done by each rank alone. The difference is what meeting costs: waking threads, and
waiting for the slower rank. Medians, because a shared machine is noisy.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import neuron_cpu

print(neuron_cpu.ensure_sdk())

import torch  # noqa: E402
from neuronx_distributed_inference.models.config import NeuronConfig  # noqa: E402
from neuronx_distributed_inference.models.llama.modeling_llama import (  # noqa: E402
    LlamaInferenceConfig,
    NeuronLlamaForCausalLM,
)
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from neuron_cpu.runtime.ranks import Combine, Group  # noqa: E402


def local_exchange(group: Group, label: str, tensor: torch.Tensor, combine: Combine):
    """A collective's arithmetic without the meeting: every rank pretends that all sent the same."""
    del label
    return combine([tensor] * group.size())[group.rank()]


@contextmanager
def without_meeting() -> Iterator[None]:
    """Ranks compute side by side and never wait for each other (their results are wrong)."""
    original = Group.exchange
    Group.exchange = local_exchange
    try:
        yield
    finally:
        Group.exchange = original


def build(folder: Path, arguments: argparse.Namespace) -> NeuronLlamaForCausalLM:
    """A random checkpoint in `folder`, compiled and loaded."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 192,
        vocab_size=49152,
        torch_dtype="bfloat16",
    )
    LlamaForCausalLM(shape).bfloat16().save_pretrained(folder)
    config = LlamaInferenceConfig(
        NeuronConfig(seq_len=128, tp_degree=arguments.tp_degree),
        load_config=load_pretrained_config(str(folder)),
    )
    app = NeuronLlamaForCausalLM(str(folder), config)
    app.compile(folder / "compiled")
    app.load(folder / "compiled")
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--tp-degree", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        app = build(Path(folder), arguments)
        prompt = torch.arange(5, 21)[None]
        app(input_ids=prompt, position_ids=torch.arange(16)[None])
        token = torch.tensor([[7]])
        app(input_ids=token, position_ids=torch.tensor([[16]]))  # warm
        times: dict[bool, list[float]] = {True: [], False: []}
        for step in range(2 * arguments.steps):
            meeting = step % 2 == 0
            with nullcontext() if meeting else without_meeting():
                start = time.perf_counter()
                app(input_ids=token, position_ids=torch.tensor([[17 + step // 2]]))
                times[meeting].append(time.perf_counter() - start)
    with_it, alone = (statistics.median(times[meeting]) for meeting in (True, False))
    print(f"decode step {with_it * 1e3:.1f} ms with collectives, {alone * 1e3:.1f} ms without")
    print(f"collectives add {with_it / alone - 1:.1%} (aim: under 5 % at degree 2)")


if __name__ == "__main__":
    main()
