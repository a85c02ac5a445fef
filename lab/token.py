"""What a user waits for a token: llama.py's look-ahead beside its plain step and the baseline.

    python -m lab.token [--write]
    python -m lab.token --measure-host [--write]

Calls are counted on recorded texts (lab/data/token_texts.json): what the embedded model wrote
greedily in fp32, its end token suppressed as the contest's main.py does, behind each of the 25
benchmark prompts, four beginnings of code and four of dialogue. A text goes up to 640 tokens, and
behind the two prompts that are longer up to 1280. llama.py's own LookAhead guesses on them. Times
are estimates of the cost model for Llama-3.2-1B at degree 2, of ours and of the baseline alike.
``--measure-host`` measures the loop of the adapter instead, around a model that knows the text and
computes nothing. ``--write`` puts the tables into the page. Two minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import neuron_cpu

neuron_cpu.ensure_sdk()

import torch  # noqa: E402
from neuronx_distributed_inference.models.config import (  # noqa: E402
    InferenceConfig,
    NeuronConfig,
    OnDeviceSamplingConfig,
)
from neuronx_distributed_inference.models.llama import modeling_llama as baseline  # noqa: E402
from neuronx_distributed_inference.utils.hf_adapter import (  # noqa: E402
    HuggingFaceGenerationAdapter,
    load_pretrained_config,
)
from transformers import GenerationConfig  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402

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
    several = sum(row.count for row in sums)
    exchanged = sum(row.total_ns for row in sums) / 1e6
    inside = sum(row.total_ns for row in step.operators) / 1e6 - exchanged
    return [
        ("kernels, and PyTorch's operators between them", inside),
        (f"{several} collectives", exchanged),
        ("launch of the graph", around.graph_ns / 1e6),
        ("logits to the host", step.launch_ns / 1e6 - host - around.graph_ns / 1e6),
        ("the host's loop", host),
        *((name, found.latency_ns / 1e6) for name, found in ways.items()),
    ]


# --- the host -------------------------------------------------------------------------------------
class Known(llama.NeuronLlamaForCausalLM):
    """llama.py's model, with look-ahead or without, whose graphs compute nothing: they give the
    logits of a recorded text. Of the processor's seconds ``inside`` it ``graphs`` and ``widening``
    of rows are parts."""

    def __init__(self, ahead: bool, text: Text) -> None:
        torch.nn.Module.__init__(self)
        length, tokens = len(text.tokens), llama.CALL_TOKENS
        self.neuron_config = NeuronConfig(batch_size=1, seq_len=length, speculation_length=tokens)
        self.config = InferenceConfig(self.neuron_config, load_config=lambda config: None)
        self.config.vocab_size = MODEL_SHAPES[MODEL]["vocab_size"]
        self.ahead = llama.LookAhead(tokens, length) if ahead else None
        dtype = torch.bfloat16 if ahead else torch.float32
        self.rows = torch.zeros(1, tokens, self.config.vocab_size, dtype=dtype)
        self.text, self.inside, self.graphs, self.widening = text, 0.0, 0.0, 0.0
        self.kv_cache_populated = self.on_device_sampling = False

    def reset(self) -> None:
        self.kv_cache_populated = False

    def graph(self, input_ids: Any, position_ids: Any, **_: Any) -> Any:
        """NxDI's forward: the rows of a call, the last one of a prompt."""
        began = time.thread_time()
        count = input_ids.shape[1] if self.kv_cache_populated else 1
        first = int(position_ids[0, -count]) + 1
        self.kv_cache_populated = True
        self.rows.zero_()
        for at, token in enumerate(self.text.tokens[first : first + count]):
            self.rows[0, at, token] = 1
        rows = self.rows[:, :count] if count > 1 else self.rows[:, :1].float()
        self.graphs += time.thread_time() - began
        return CausalLMOutputWithPast(logits=rows)

    def forward(self, *args: Any, **given: Any) -> Any:
        began = time.thread_time()
        output = super().forward(*args, **given)
        self.inside += time.thread_time() - began
        return output

    def _construct_output(self, logits: Any, *more: Any) -> Any:
        began = time.thread_time()
        output = super()._construct_output(logits, *more)
        self.widening += time.thread_time() - began
        return output


def host_ms(ahead: bool, text: Text) -> tuple[float, float, float]:
    """Milliseconds of processor time a token: the adapter's loop here, look-ahead in it, and the
    widening of rows to fp32."""
    model, count = Known(ahead, text), len(text.tokens) - text.prompt
    prompt = torch.tensor([text.tokens[: text.prompt]])
    with mock.patch.object(baseline.NeuronLlamaForCausalLM, "forward", Known.graph):
        began = time.thread_time()
        found = HuggingFaceGenerationAdapter(model).generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            pad_token_id=0,
            generation_config=GenerationConfig(eos_token_id=2),
            **dict(max_new_tokens=count, min_new_tokens=count, do_sample=True, top_k=1),
        )
        whole = time.thread_time() - began
    assert found[0].tolist() == text.tokens, "the loop wrote another text"
    own = model.inside - model.graphs - model.widening
    each = 1e3 / count
    return each * (whole - model.inside), each * own, each * model.widening


# --- tables ---------------------------------------------------------------------------------------
def middle_and_worst(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}, {min(values):.2f}"


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


def of_the_host(costs: dict[int, Costs], known: Sequence[Text]) -> str:
    """Of the adapter's loop without look-ahead, and of look-ahead in the same loop."""
    alone, ahead = ([host_ms(kind, text) for text in known[:5]] for kind in (False, True))
    loop, _, _ = map(statistics.median, zip(*alone))
    _, own, widening = map(statistics.median, zip(*ahead))
    ratios = [
        costs[len(text.tokens)]._replace(host=loop).ratio(calls(text, llama.CALL_TOKENS))
        for text in known
    ]
    cells = [f"{loop:.2f}", f"{own:.3f}", f"{widening:.3f}", middle_and_worst(ratios)]
    head = "the adapter's loop | look-ahead | a row widened | times the baseline, median and worst"
    return table(head, [cells])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measure-host", action="store_true", help="the adapter's loop, here")
    parser.add_argument("--write", action="store_true", help=f"the tables into {PAGE.name}")
    given = parser.parse_args()
    costs = published() if given.measure_host else {keys: estimated(keys) for keys in KEYS}
    known = texts()
    prompts = [text for text in known if text.kind == "prompt"]
    if given.measure_host:
        made = {"host": of_the_host(costs, prompts)}
    else:
        made = {
            "costs": of_costs(costs),
            "texts": of_texts(costs, known),
            "parts": table("part | ms", [[name, f"{ms:.2f}"] for name, ms in parts(KEYS[0])]),
        }
    for name, text in made.items():
        print(f"{name}:\n\n{text}\n")
        if given.write:
            pages.publish(PAGE, name, text)
    if given.write and not given.measure_host:
        pages.publish(ROOT / "docs" / "cost_model.md", "step", of_a_step(costs))
    one = costs[KEYS[0]]
    print(f"without look-ahead {(one.baseline + one.host) / (one.plain + one.host):.2f}")
    ratios = [costs[len(text.tokens)].ratio(calls(text, llama.CALL_TOKENS)) for text in prompts]
    median, worst = statistics.median(ratios), min(ratios)
    print(f"median {median:.2f}, worst {worst:.2f} times the baseline")
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
