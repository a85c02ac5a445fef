"""What a user waits for a token: llama.py's look-ahead beside its plain step and the baseline.

    python -m lab.token [--write]

Calls are counted on recorded texts (lab/data/token_texts.json): what the embedded model wrote
greedily in fp32, its end token suppressed as the contest's main.py does, behind each of the 25
benchmark prompts, four beginnings of code and four of dialogue. A text goes up to 640 tokens, and
behind the two prompts that are longer up to 1280. llama.py's own LookAhead guesses on them. Times
are estimates of the cost model for Llama-3.2-1B at degree 2, of ours and of the baseline alike.
``--write`` puts the tables into the page. Two minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import neuron_cpu

neuron_cpu.ensure_sdk()

import torch  # noqa: E402
from neuronx_distributed_inference.models.config import (  # noqa: E402
    NeuronConfig,
    OnDeviceSamplingConfig,
)
from neuronx_distributed_inference.models.llama import modeling_llama as baseline  # noqa: E402
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config  # noqa: E402

import llama  # noqa: E402
from harness.figures import tracing  # noqa: E402
from harness.figures.estimate import COLLECTIVE, Estimator, events_of, logits_rows  # noqa: E402
from harness.model_shapes import MODEL_SHAPES  # noqa: E402
from harness.simulator import cost  # noqa: E402
from lab import NOTES, ROOT, pages  # noqa: E402

TEXTS, PAGE = ROOT / "lab" / "data" / "token_texts.json", NOTES / "token.md"
MODEL, DEGREE, KEYS = "llama-3.2-1b", 2, (640, 1280)
CALL = re.compile(
    r"^\|[^|]*, a call \| ([\d.]+) \|[^|]*\| ([\d.]+) \|", re.M
)  # of a published step
WIDTH = 120  # of a page's lines
DECODE, SEVERAL = "token_generation_model", "speculation_model"


class Text(NamedTuple):
    """A recorded text, the first ``prompt`` of its tokens given."""

    kind: str
    number: int
    prompt: int
    tokens: list[int]


class Calls(NamedTuple):
    """Calls behind a prompt: of one token, of several, and the tokens that came out of both."""

    single: int
    several: int
    tokens: int

    @property
    def per_call(self) -> float:
        return self.tokens / (self.single + self.several)


def texts() -> list[Text]:
    return [Text(**row) for row in json.loads(TEXTS.read_text())]


def calls(text: Text, tokens: int) -> Calls:
    """What ``tokens`` a call need for a text, as the adapter's loop asks llama.py's LookAhead."""
    room = next(keys for keys in KEYS if keys >= len(text.tokens))
    ahead, row = llama.LookAhead(tokens, room), torch.zeros(1, tokens, 1)
    for token in text.tokens[: text.prompt]:
        ahead.guesser.add(token)
    for position in range(text.prompt, len(text.tokens) - 1):
        token = text.tokens[position]
        if ahead.kept(token, position) is None:
            guesses = ahead.guesses(token, position)
            if guesses:
                ahead.keep([token, *guesses], position, row)
    single, several = ahead.calls
    return Calls(single, several, single + several + ahead.kept_rows)


# --- costs ----------------------------------------------------------------------------------------
class Costs(NamedTuple):
    """Milliseconds: a decode step of the baseline and of ours without the host's loop, our call of
    several tokens, the loop of a token, and the shortest and longest step of ours, with the
    loop, that a device would show."""

    baseline: float
    plain: float
    several: float
    host: float
    band: tuple[float, float]

    def token(self, found: Calls) -> float:
        """A token with look-ahead."""
        spent = found.single * self.plain + found.several * self.several
        return spent / found.tokens + self.host

    def ratio(self, found: Calls) -> float:
        return (self.baseline + self.host) / self.token(found)


def published() -> dict[int, Costs]:
    """Costs by keys, as the page has them."""
    lines = pages.published(PAGE, "costs").splitlines()[2:]
    found = {}
    for keys, base, plain, band, several, host in (line.strip("| ").split(" | ") for line in lines):
        loop, (low, high) = float(host), map(float, band.split(" to "))
        found[int(keys)] = Costs(
            float(base) - loop, float(plain) - loop, float(several), loop, (low, high)
        )
    return found


def overheads() -> tuple[cost.Overheads, float]:
    """Costs outside of kernels, and the host's loop in ms, as published."""
    around = cost.Overheads()
    return around, (around.argmax_ns + around.host_ns) / 1e6


def graph(model: Any, tag: str, keys: int, folder: Path, **how: Any) -> Any:
    """The estimate of a graph that has a cache of so many keys."""
    wrapper = next(one for one in model.models if one.tag == tag)
    record = tracing.record(model, wrapper, keys, folder)
    rows = logits_rows(record, MODEL_SHAPES[MODEL]["vocab_size"])
    estimator = Estimator(cost.DEFAULT_PROFILE, overheads()[0], DEGREE, **how)
    return estimator.graph(tag, keys, 1, events_of(record), rows)


def asked(keys: int) -> dict[str, Any]:
    return dict(tp_degree=DEGREE, batch_size=1, seq_len=keys, torch_dtype=torch.bfloat16)


def estimated(keys: int) -> Costs:
    """By the cost model, with the host as published."""
    _, host = overheads()
    with tempfile.TemporaryDirectory() as name:
        folder, shape = Path(name), MODEL_SHAPES[MODEL]
        ours = tracing.application(llama, shape, folder, **asked(keys), max_context_length=64)
        loader = load_pretrained_config(name)
        config = baseline.LlamaInferenceConfig(NeuronConfig(**asked(keys)), load_config=loader)
        other = baseline.NeuronLlamaForCausalLM(name, config)
        found = [
            graph(model, tag, keys, folder)
            for model, tag in ((other, DECODE), (ours, DECODE), (ours, SEVERAL))
        ]
    base, plain, several = (one.latency_ns / 1e6 - host for one in found)
    low, high = (ns / 1e6 for ns in found[1].band_ns)
    return Costs(base, plain, several, host, (low, high))


def parts(keys: int) -> list[tuple[str, float]]:
    """Parts of our plain step, and the step where the driver asks for more, in ms."""
    around, host = overheads()
    sampling = dict(on_device_sampling_config=OnDeviceSamplingConfig())
    with tempfile.TemporaryDirectory() as name:
        folder, shape, given = Path(name), MODEL_SHAPES[MODEL], asked(keys)
        ours = tracing.application(llama, shape, folder, **given, max_context_length=64)
        drawn = tracing.application(llama, shape, folder, **given, **sampling)
        step = graph(ours, DECODE, keys, folder)
        ways = {
            "the whole step": step,
            "with `--on-device-sampling`": graph(drawn, DECODE, keys, folder, samples=True),
            "with `--async-mode`, too": graph(
                drawn, DECODE, keys, folder, samples=True, runs_ahead=True
            ),
        }
    sums = [row for row in step.operators if row.kind == COLLECTIVE]
    exchanged = sum(row.total_ns for row in sums) / 1e6
    inside = sum(row.total_ns for row in step.operators) / 1e6 - exchanged
    return [
        ("kernels, and PyTorch's operators between them", inside),
        (f"{sum(row.count for row in sums)} collectives", exchanged),
        ("launch of the graph", around.graph_ns / 1e6),
        ("logits to the host", step.launch_ns / 1e6 - host - around.graph_ns / 1e6),
        ("the host's loop", host),
        *((name, found.latency_ns / 1e6) for name, found in ways.items()),
    ]


# --- tables ---------------------------------------------------------------------------------------
def table(head: str, rows: Sequence[Sequence[str]]) -> str:
    lines = [[*head.split(" | ")], ["---"] * (head.count(" | ") + 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def of_costs(costs: dict[int, Costs]) -> str:
    rows = [
        [f"{keys}", f"{one.baseline + one.host:.2f}", f"{one.plain + one.host:.2f}"]
        + ["{:.2f} to {:.2f}".format(*one.band), f"{one.several:.2f}", f"{one.host:.2f}"]
        for keys, one in costs.items()
    ]
    calls_of = f"a call of {llama.CALL_TOKENS} tokens, no loop"
    ours = "plain `llama.py` | its band"
    return table(f"keys | baseline | {ours} | {calls_of} | the host's loop", rows)


def of_a_step(costs: dict[int, Costs], model: Path = NOTES / "cost_model.md") -> str:
    """The plain step beside the baseline's, and what the shortfall of published calls leaves of
    their ratio."""
    one = costs[KEYS[0]]
    base, plain = one.baseline + one.host, one.plain + one.host
    calls = CALL.findall(model.read_text(encoding="utf-8"))
    short = [float(measured) - float(estimate) for measured, estimate in calls]
    alike = (base + max(short)) / (plain + max(short))
    others = [(base + by) / plain for by in (min(short), max(short))]
    text = (
        f"The baseline's step is estimated as {base:.2f} ms, `llama.py`'s plain step as "
        f"{plain:.2f}, {base / plain:.2f} times as fast, with a band of {one.band[0]:.2f} to "
        f"{one.band[1]:.2f}. Nobody has published the first or measured the second. Published "
        f"calls are {min(short):.2f} to {max(short):.2f} ms longer than their estimates. If both "
        f"steps are, it is {alike:.2f} times; if the baseline's alone is, {others[0]:.2f} to "
        f"{others[1]:.2f}."
    )
    return textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="  ")


def of_texts(costs: dict[int, Costs], known: Sequence[Text]) -> str:
    rows = []
    for text in known:
        found, one = calls(text, llama.CALL_TOKENS), costs[len(text.tokens)]
        rows.append(
            [f"{text.kind} {text.number}", f"{text.prompt}", f"{len(text.tokens)}"]
            + [f"{found.single + found.several}", f"{found.per_call:.2f}"]
            + [f"{one.token(found):.2f}", f"{one.ratio(found):.2f}"]
        )
    head = "text | prompt | length | calls | tokens a call | ms a token | times the baseline"
    return table(head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"the tables into {PAGE.name}")
    given = parser.parse_args()
    costs = {keys: estimated(keys) for keys in KEYS}
    known = texts()
    made = {
        "costs": of_costs(costs),
        "texts": of_texts(costs, known),
        "parts": table("part | ms", [[name, f"{ms:.2f}"] for name, ms in parts(KEYS[0])]),
    }
    for name, text in made.items():
        print(f"{name}:\n\n{text}\n")
        if given.write:
            pages.publish(PAGE, name, text)
    if given.write:
        pages.publish(ROOT / "docs" / "cost_model.md", "step", of_a_step(costs))
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
