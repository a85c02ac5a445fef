"""What prompt lookup saves: tokens a step on prompts.txt, and milliseconds a token by the estimate.

    python benchmarks/speculation.py [--lookup 2 4 6 9 15] [--texts FILE] [driver arguments ...]

The acceptance is measured: the embedded model answers every prompt greedily, and the lookup is
replayed over the answer, which is what the driver does, step by step. The times are estimated: a
step of several tokens and one of a single token of Llama-3.2-1B, degree 2, cache 640, or of what
the driver's arguments say (--quantize fp8, say). So the embedded model's acceptance stands in for
the larger one's, whose weights are gated: a larger model quotes differently.

A prompt counts as quoted where at least half of the answer's runs of four tokens stand in it.
`--texts` keeps the answers, which take minutes, for the next run.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import neuron_cpu  # noqa: E402

neuron_cpu.ensure_sdk()

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from harness.figures import estimate  # noqa: E402
from harness.figures.graphs import CHUNK, DECODE  # noqa: E402
from harness.figures.reference import PROMPTS_FILE  # noqa: E402
from harness.inputs import command_line  # noqa: E402
from harness.inputs.models import embedded_model  # noqa: E402
from harness.inputs.prompts import encode, read_prompt_file  # noqa: E402
from harness.modes.profile import shapes_only_session  # noqa: E402
from harness.processes.worker import Host, Job  # noqa: E402
from harness.session.model import construct  # noqa: E402
from harness.session.speculation import Lookup  # noqa: E402
from harness.simulator import COMPILER_ORDER, cost  # noqa: E402

NEW_TOKENS = 192
RUN, QUOTED = 4, 0.5  # tokens, and the share of such runs that makes a quotation
MODEL = ("--profile-model", "llama-3.2-1b", "--seq-len", "640", "--tp-degree", "2")


class Answer(NamedTuple):
    """Token ids of a prompt and of the greedy answer."""

    prompt: list[int]
    new: list[int]

    @property
    def quoted(self) -> float:
        """Share of the answer's runs of tokens that stand in the prompt."""
        runs = {tuple(self.prompt[i : i + RUN]) for i in range(len(self.prompt) - RUN + 1)}
        own = [tuple(self.new[i : i + RUN]) for i in range(len(self.new) - RUN + 1)]
        return sum(run in runs for run in own) / len(own) if own else 0.0


class Calls(NamedTuple):
    """Calls behind the prefill with guesses and without, and the tokens that they gave."""

    guessed: int
    alone: int
    tokens: int

    def milliseconds(self, several: float, one: float) -> float:
        """Of a token."""
        return (self.guessed * several + self.alone * one) / self.tokens


def answers(kept: Path | None) -> list[Answer]:
    """The embedded model's, in bf16, from the file where it has them."""
    if kept is not None and kept.is_file():
        return [Answer(*row) for row in json.loads(kept.read_text())]
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = embedded_model()
    model = LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for ids in encode(tokenizer, read_prompt_file(PROMPTS_FILE), False):
        with torch.inference_mode():
            text = model.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
            )
        found.append(Answer(ids, text[0, len(ids) :].tolist()))
    if kept is not None:
        kept.write_text(json.dumps(found))
    return found


def replay(answer: Answer, count: int) -> Calls:
    """The calls that `count` guesses a step take for an answer, whose first token is there."""
    lookup = Lookup(count, len(answer.prompt) + len(answer.new) + count)
    done, guessed, alone = 1, 0, 0
    while done < len(answer.new):
        text = torch.tensor([answer.prompt + answer.new[:done]])
        guesses = lookup.guess(text, count)
        right = next(
            (i for i, pair in enumerate(zip(guesses, answer.new[done:])) if len(set(pair)) > 1),
            min(len(guesses), len(answer.new) - done),
        )
        guessed, alone = guessed + bool(guesses), alone + (not guesses)
        done += right + 1
    return Calls(guessed, alone, len(answer.new) - 1)


def added(parts: Sequence[Calls]) -> Calls:
    return Calls(*(sum(column) for column in zip(*parts)))


def step_milliseconds(count: int, arguments: Sequence[str]) -> tuple[float, float]:
    """A step of `count` guesses and one more token, and one of a single token (estimated)."""
    asked = [*MODEL, "--prompt-lookup-num-tokens", str(count), *arguments]
    settings = command_line.parse(["--mode", "profile", "--enable-nki", *asked])
    with tempfile.TemporaryDirectory() as scratch:
        session = shapes_only_session(settings, Path(scratch))
        job = Job(
            session.settings, session.model.path, 0, None, session.submission, Path(scratch),
            None, False,
        )  # fmt: skip
        host = Host(job, print)
        construct(host, "nki")
        graphs = estimate.graphs(host, "nki", cost.DEFAULT_PROFILE, COMPILER_ORDER).graphs
    times = {graph.submodel: graph.latency_ns / 1e6 for graph in graphs}
    return times[CHUNK], times.get(DECODE, times[CHUNK])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lookup", type=int, nargs="+", default=[2, 4, 6, 9, 15])
    parser.add_argument("--texts", type=Path, help="file that keeps the answers")
    args, arguments = parser.parse_known_args()
    found = answers(args.texts)
    quoting = [index for index, answer in enumerate(found) if answer.quoted >= QUOTED]
    out = Console(width=max(100, Console().width))
    table = Table(title="Tokens a step, measured on the embedded model")
    table.add_column("prompt")
    for name in ("tokens", "new", "quoted", *(f"{count} guesses" for count in args.lookup)):
        table.add_column(name, justify="right")
    for index, answer in enumerate(found):
        calls = [replay(answer, count) for count in args.lookup]
        rates = [f"{c.tokens / (c.guessed + c.alone):.2f}" if c.tokens else "-" for c in calls]
        sizes = str(len(answer.prompt)), str(len(answer.new)), f"{answer.quoted:.0%}"
        table.add_row(str(index), *sizes, *rates)
    out.print(table)
    table = Table(title=f"{' '.join(arguments) or 'bf16'}: ms (estimated) by that acceptance")
    for name in ("guesses", "a step", "of one token", "a token", "where it quotes", "times fewer"):
        table.add_column(name, justify="right")
    for count in args.lookup:
        several, one = step_milliseconds(count, arguments)
        calls = [replay(answer, count) for answer in found]
        whole = added(calls).milliseconds(several, one)
        quotes = added([calls[index] for index in quoting]).milliseconds(several, one)
        row = (several, one, whole, quotes, one / quotes)
        table.add_row(str(count), *(f"{value:.3f}" for value in row))
    out.print(table)
    out.print(f"Prompts that quote: {', '.join(map(str, quoting))}")


if __name__ == "__main__":
    main()
