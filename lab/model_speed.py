"""The simulator's speed beside Hugging Face's in bf16, and where its time goes.

    python -m lab.model_speed [--layers N] [--guesses N] [--prompt-tokens N] [--tokens N]

Both run in this process, one after the other, on the same model: the embedded one, or with
``--layers`` a Llama-3.2-1B of so many layers with seeded weights. A step's time is the least and
the median of all steps but the first ones, in processor time of all threads and in wall time; other
work on the machine lengthens the second one above all. Last come the calls of PyTorch of a decode
step by kind, with their own time, and how many of them kernels make.
"""

import argparse
import collections
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import neuron_cpu

neuron_cpu.ensure_sdk()

import torch  # noqa: E402
from neuronx_distributed_inference.models.model_wrapper import RankedModel  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

import main as driver  # noqa: E402
from harness.inputs.models import embedded_model  # noqa: E402
from lab import pages  # noqa: E402
from neuron_cpu.core.run.execute import Plan  # noqa: E402

SKIPPED = 8  # steps: until every kernel runs in its short form
PROMPTS = 7  # times that a prompt is read: the last ones in short forms
COUNTED = 4  # steps whose calls are counted
ONE_B = dict(  # Llama-3.2-1B's config.json
    hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
    head_dim=64, vocab_size=128256, rope_theta=500000.0, rms_norm_eps=1e-5,
    tie_word_embeddings=True, max_position_embeddings=131072, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


class Step(NamedTuple):
    """One call of a model: its new tokens of a row, and seconds."""

    tokens: int
    processor: float
    wall: float


def timed(call: Callable[..., Any], steps: list[Step], tokens: int, *given: Any) -> Any:
    """``call(*given)``, noted among ``steps``."""
    processor, wall = time.process_time(), time.perf_counter()
    made = call(*given)
    steps.append(Step(tokens, time.process_time() - processor, time.perf_counter() - wall))
    return made


@contextlib.contextmanager
def watched(steps: list[Step], profile: Any) -> Iterator[None]:
    """Note the simulator's steps; profile COUNTED steps of one token after SKIPPED."""
    call, run = RankedModel.__call__, Plan.run
    decodes: collections.Counter[int] = collections.Counter()

    def noted(model: Any, bucket: Any, *inputs: torch.Tensor) -> Any:
        tokens = inputs[0].shape[1]
        short = tokens <= 32
        decodes[tokens] += 1
        counts = tokens == 1 and SKIPPED < decodes[tokens] <= SKIPPED + COUNTED
        if counts:
            with profile:
                return call(model, bucket, *inputs)
        for _ in range(0 if short else PROMPTS - 1):  # the first one makes plans and packs weights
            timed(call, steps, tokens, model, bucket, *inputs)
        return timed(call, steps, tokens, model, bucket, *inputs)

    def marked(plan: Plan, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.profiler.record_function("kernel"):
            return run(plan, inputs)

    RankedModel.__call__, Plan.run = noted, marked  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        RankedModel.__call__, Plan.run = call, run  # type: ignore[method-assign]


def simulated(prompt: str, tokens: int, more: Sequence[str], profiles: list[Any]) -> list[Step]:
    """Steps of the driver's generation with kernels."""
    steps: list[Step] = []

    class Each:
        def __enter__(self) -> None:
            self.one = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.one.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.one.__exit__(*error)
            profiles.append(self.one)

    with watched(steps, Each()):
        status = driver.main(
            [
                "--mode",
                "generate",
                "--enable-nki",
                "--no-isolate",
                "--raw",
                "--prompt",
                prompt,
                "--max-new-tokens",
                str(tokens),
                *more,
            ]
        )
    if status:
        raise SystemExit(status)
    return steps


def hugging_face(folder: Path, prompt_tokens: int, tokens: int) -> list[Step]:
    """Steps of transformers in bf16 behind a prompt of so many tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16).eval()
    steps: list[Step] = []
    with torch.inference_mode():
        for at in range(tokens + PROMPTS - 1):
            if at < PROMPTS:  # each time anew
                ids, cache = torch.arange(prompt_tokens)[None] + 100, None
            given = {"input_ids": ids, "past_key_values": cache, "use_cache": True}
            made = timed(lambda given=given: model(**given), steps, ids.shape[1])
            cache, ids = made.past_key_values, made.logits[:, -1:].argmax(-1)
    return steps


def seeded(layers: int, folder: Path) -> None:
    """A Llama-3.2-1B of so many layers, with the embedded model's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=layers, torch_dtype="bfloat16", **ONE_B)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    for path in embedded_model().glob("*token*"):
        shutil.copy(path, folder)


def row(name: str, ours_and_theirs: Sequence[list[Step]], skipped: int) -> str:
    """A line of the table: processor ms (least, median), wall ms, ratios of the two."""
    cells = []
    for field in ("processor", "wall"):
        times = [[1e3 * getattr(s, field) for s in steps[skipped:]] for steps in ours_and_theirs]
        if not all(times):
            return f"{name:<24} too few steps; raise --tokens"
        least = [min(t) for t in times]
        middle = [statistics.median(t) for t in times]
        cells += [f"{least[0]:8.1f} {middle[0]:8.1f} {least[1]:8.1f} {middle[1]:8.1f}"]
        cells += [f"{least[0] / least[1]:6.2f} {middle[0] / middle[1]:6.2f}"]
    return f"{name:<24}" + " |".join(cells)


def calls(profiles: list[Any]) -> str:
    """PyTorch's calls of a decode step by kind."""
    kinds: collections.Counter[str] = collections.Counter()
    own: collections.Counter[str] = collections.Counter()
    inside = 0
    for profile in profiles:
        events = profile.events()
        spans = [e.time_range for e in events if e.name == "kernel"]
        for event in (e for e in events if "::" in e.name):
            kinds[event.name] += 1
            own[event.name] += event.self_cpu_time_total / 1e3
            inside += any(s.start <= event.time_range.start <= s.end for s in spans)
    n = max(1, len(profiles))
    total = sum(kinds.values()) / n
    lines = [
        f"PyTorch's calls of a decode step: {total:.0f}, of which kernels make {inside / n:.0f}"
    ]
    lines += [f"{k:<52} {c / n:7.0f} {own[k] / n:8.2f} ms" for k, c in kinds.most_common(16)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, help="of Llama-3.2-1B, instead of the embedded model")
    parser.add_argument("--guesses", type=int, default=0, help="tokens guessed in each step")
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=40)
    args = parser.parse_args()
    whole = args.prompt_tokens + args.tokens * (args.guesses + 1)
    more = ["--seq-len", str(max(128, -(-whole // 64) * 64))]
    if args.guesses:
        more += ["--prompt-lookup-num-tokens", str(args.guesses)]
    profiles: list[Any] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = embedded_model()
        if args.layers:
            folder = Path(scratch)
            seeded(args.layers, folder)
            more += ["--model-path", str(folder), "--tp-degree", "1"]
        prompt = " the" * args.prompt_tokens  # a token each, without a template
        ours = simulated(prompt, args.tokens, more, profiles)
        theirs = hugging_face(folder, args.prompt_tokens, args.tokens)
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    print(
        f"\n{torch.get_num_threads()} threads, load {load}; ms: ours least, median; Hugging Face's"
    )
    print(f"{'':<24}processor time, ratios | wall time, ratios")
    prompts = [[s for s in steps if s.tokens > 32] for steps in (ours, theirs)]
    decodes = [s for s in ours if s.tokens <= 32]
    if all(prompts):
        first = prompts[0][0]
        print(f"first prompt: {first.processor:.1f} s of processor time, {first.wall:.1f} s")
        print(row(f"prompt of {prompts[0][-1].tokens}", prompts, 1))
    alone = [s for s in theirs if s.tokens == 1]
    for tokens in sorted({s.tokens for s in decodes}):  # look-ahead takes steps of two sizes
        own = [s for s in decodes if s.tokens == tokens]
        print(row(f"step of {tokens}", [own, alone], SKIPPED))
    print(calls(profiles))
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
