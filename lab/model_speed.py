"""The simulator's speed beside Hugging Face's in bf16, and where its time goes.

    python -m lab.model_speed [--layers N] [--guesses N] [--prompt-tokens N] [--tokens N] [--write]

Both run in this process, one after the other, on the same model: the embedded one, or with
``--layers`` a Llama-3.2-1B of so many layers with seeded weights. A step's time is the least and
the median of all steps but the first ones, in processor time of all threads and in wall time; other
work on the machine lengthens the second one above all. Last come the process's memory behind the
simulator's steps and the calls of PyTorch of a decode step by kind, with their own time, and how
many of them kernels make. ``--write`` puts that into lab/docs/experiments.md: a prompt of over
LONG tokens, steps of the embedded model and of Llama-3.2-1B each have a place of their own there.
"""

import argparse
import collections
import contextlib
import datetime
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import neuron_cpu

neuron_cpu.ensure_sdk()

import torch  # noqa: E402
from neuronx_distributed_inference.models.model_wrapper import RankedModel  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

import main as driver  # noqa: E402
from harness.inputs.models import embedded_model  # noqa: E402
from lab import NOTES, pages  # noqa: E402
from neuron_cpu.core.run import packing  # noqa: E402
from neuron_cpu.core.run.execute import Plan  # noqa: E402

PAGE = NOTES / "experiments.md"
LONG = 256  # tokens of a prompt whose own time is asked for
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


HEAD = [
    "| step | ms | Hugging Face, ms | ratio | of medians | of wall time |",
    "| --- | --- | --- | --- | --- | --- |",
]


def row(name: str, ours_and_theirs: Sequence[list[Step]], skipped: int) -> str:
    """A line of the table: least processor ms, their ratio, that of the medians and of least wall
    times."""
    ours, theirs = (steps[skipped:] for steps in ours_and_theirs)
    if not ours or not theirs:
        return f"| {name} | too few steps; raise --tokens | | | | |"
    least = [1e3 * min(s.processor for s in steps) for steps in (ours, theirs)]
    middle = [statistics.median(s.processor for s in steps) for steps in (ours, theirs)]
    wall = [min(s.wall for s in steps) for steps in (ours, theirs)]
    ratios = [f"{one / other:.2f}" for one, other in (least, middle, wall)]
    return "| " + " | ".join([name, *(f"{ms:.1f}" for ms in least), *ratios]) + " |"


def memory() -> str:
    """MiB of this process by kind (proc_pid_status(5)); empty elsewhere than on Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return ""
    lines = (line.split() for line in status.read_text().splitlines())
    kib = {words[0]: int(words[1]) for words in lines if words[-1] == "kB"}
    most, own, files = (kib[key] >> 10 for key in ("VmHWM:", "RssAnon:", "RssFile:"))
    return (
        f"Memory: {most} MiB resident at most. At the end {own} are its own,\n"
        f"packed weights of {packing.held() >> 20} among them, and {files} are pages of files."
    )


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
        f"PyTorch's calls of a decode step: {total:.0f}, of which kernels make {inside / n:.0f}.",
        "",
        "| call | of a step | ms of its own |",
        "| --- | --- | --- |",
    ]
    lines += [f"| `{k[6:]}` | {c / n:.0f} | {own[k] / n:.2f} |" for k, c in kinds.most_common(16)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, help="of Llama-3.2-1B, instead of the embedded model")
    parser.add_argument("--guesses", type=int, default=0, help="tokens guessed in each step")
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
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
        resident = memory()
        theirs = hugging_face(folder, args.prompt_tokens, args.tokens)
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    cores, vectors = os.cpu_count(), torch.backends.cpu.get_cpu_capability()
    model = f"{args.layers} layers of Llama-3.2-1B" if args.layers else "the embedded model"
    lines = [
        f"*Measured* on {datetime.date.today()}: {model}, PyTorch {torch.__version__}, {cores} "
        f"cores ({vectors}), threads {torch.get_num_threads()}, load {load}.",
        "",
        *HEAD,
    ]
    prompts = [[s for s in steps if s.tokens > 32] for steps in (ours, theirs)]
    decodes = [s for s in ours if s.tokens <= 32]
    if all(prompts):
        lines.append(row(f"prompt of {prompts[0][-1].tokens}", prompts, 1))
    alone = [s for s in theirs if s.tokens == 1]
    for tokens in sorted({s.tokens for s in decodes}):  # look-ahead takes steps of two sizes
        own = [s for s in decodes if s.tokens == tokens]
        lines.append(row(f"step of {tokens}", [own, alone], SKIPPED))
    lines += ["", resident] if resident else []
    if profiles:
        lines += ["", calls(profiles)]
    print("\n" + "\n".join(lines))
    if args.write:
        of_prompt = "prompt" if args.prompt_tokens > LONG else "steps"
        pages.publish(PAGE, f"speed of {'1B' if args.layers else of_prompt}", "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
