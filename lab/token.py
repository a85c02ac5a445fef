"""What a user waits for a token: llama.py's look-ahead beside its plain step and the baseline.

    python -m lab.token [--measure-host]

Calls are counted on recorded texts (lab/data/token_texts.json): what the embedded model wrote
greedily in fp32, its end token suppressed as the contest's main.py does, up to 640 tokens behind
each of the benchmark prompts that leave room for 50, four beginnings of code and four of dialogue.
llama.py's own LookAhead guesses on them. Times are estimates of the cost model for Llama-3.2-1B at
degree 2 over 640 keys, of ours and of the baseline alike. ``--measure-host`` adds the loop of the
adapter around a model that computes nothing, measured here. Under a minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import neuron_cpu

neuron_cpu.ensure_sdk()

import torch  # noqa: E402
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig  # noqa: E402
from neuronx_distributed_inference.models.llama import modeling_llama as baseline  # noqa: E402
from neuronx_distributed_inference.utils.hf_adapter import (  # noqa: E402
    HuggingFaceGenerationAdapter,
    load_pretrained_config,
)
from transformers import GenerationConfig  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402

import llama  # noqa: E402
from harness.figures import tracing  # noqa: E402
from harness.figures.estimate import Estimator, events_of, logits_rows  # noqa: E402
from harness.model_shapes import MODEL_SHAPES  # noqa: E402
from harness.simulator import cost  # noqa: E402
from lab import ROOT  # noqa: E402

TEXTS = ROOT / "lab" / "data" / "token_texts.json"
MODEL, DEGREE, KEYS = "llama-3.2-1b", 2, 640
ASKED = dict(tp_degree=DEGREE, batch_size=1, seq_len=KEYS, torch_dtype=torch.bfloat16)


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
    ahead, row = llama.LookAhead(tokens, KEYS), torch.zeros(1, tokens, 1)
    ahead.begin(text.tokens[: text.prompt])
    for position in range(text.prompt, len(text.tokens) - 1):
        token = text.tokens[position]
        if ahead.kept(token, position) is None:
            guesses = ahead.guesses(token, position)
            if guesses:
                ahead.keep([token, *guesses], position, row)
    return Calls(*ahead.calls, sum(ahead.calls) + ahead.kept_rows)


class Costs(NamedTuple):
    """Milliseconds: a decode step of the baseline and of ours without the host's loop, our call of
    several tokens, and the loop of a token."""

    baseline: float
    plain: float
    several: float
    host: float

    def token(self, found: Calls) -> float:
        """A token with look-ahead."""
        spent = found.single * self.plain + found.several * self.several
        return spent / found.tokens + self.host

    def ratio(self, found: Calls) -> float:
        return (self.baseline + self.host) / self.token(found)


def estimated() -> Costs:
    """By the cost model, with the host as published."""
    overheads = cost.Overheads()
    host = (overheads.argmax_ns + overheads.host_ns) / 1e6
    estimator = Estimator(cost.DEFAULT_PROFILE, overheads, DEGREE)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder, shape = Path(name), MODEL_SHAPES[MODEL]
        ours = tracing.application(llama, shape, folder, **ASKED, max_context_length=64)
        loader = load_pretrained_config(name)
        plain = baseline.LlamaInferenceConfig(NeuronConfig(**ASKED), load_config=loader)
        for model in (ours, baseline.NeuronLlamaForCausalLM(name, plain)):
            for wrapper in model.models[1:]:
                record = tracing.record(model, wrapper, KEYS, folder)
                rows = logits_rows(record, shape["vocab_size"])
                graph = estimator.graph(wrapper.tag, KEYS, 1, events_of(record), rows)
                found[model is ours, wrapper.tag] = graph.latency_ns / 1e6 - host
    step = "token_generation_model"
    return Costs(found[False, step], found[True, step], found[True, "speculation_model"], host)


class Constant:
    """A model for the adapter that computes nothing, with llama.py's look-ahead or without."""

    def __init__(self, ahead: bool, vocabulary: int) -> None:
        self.neuron_config = NeuronConfig(batch_size=1, seq_len=KEYS)
        self.config = InferenceConfig(self.neuron_config, load_config=lambda config: None)
        self.config.vocab_size = vocabulary
        self.ahead = llama.LookAhead(llama.CALL_TOKENS, KEYS) if ahead else None
        self.rows = torch.zeros(1, llama.CALL_TOKENS, vocabulary, dtype=torch.bfloat16)
        self.spent, self.kv_cache_populated, self.on_device_sampling = 0.0, False, False

    def reset(self) -> None:
        self.kv_cache_populated = False

    def get_required_kwargs(self) -> list[str]:
        return []

    def forward(self, input_ids: Any, position_ids: Any, **_: Any) -> Any:
        began, row = time.thread_time(), self.rows[:, :1]
        if input_ids.shape[1] > 1:
            self.kv_cache_populated = True
            if self.ahead is not None:
                self.ahead.begin(input_ids[0].tolist())
        elif self.ahead is not None:
            token, position = int(input_ids), int(position_ids)
            kept = self.ahead.kept(token, position)
            if kept is None:
                guesses = self.ahead.guesses(token, position)
                kept = self.ahead.keep([token, *guesses], position, self.rows)
            row = kept
        row = row.float()
        self.spent += time.thread_time() - began
        return CausalLMOutputWithPast(logits=row)

    __call__ = forward


def host_ms(ahead: bool, count: int = 200) -> tuple[float, float]:
    """Milliseconds of processor time a token of the adapter's loop here, and of the model."""
    model = Constant(ahead, MODEL_SHAPES[MODEL]["vocab_size"])
    prompt = torch.arange(3, 43)[None]
    asked = dict(max_new_tokens=count, min_new_tokens=count, do_sample=True, top_k=1)
    began = time.thread_time()
    HuggingFaceGenerationAdapter(model).generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        pad_token_id=0,
        generation_config=GenerationConfig(eos_token_id=2),
        **asked,
    )
    whole = time.thread_time() - began
    return 1e3 * (whole - model.spent) / count, 1e3 * model.spent / count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure-host", action="store_true", help="the adapter's loop, here")
    args = parser.parse_args(arguments)
    costs, tokens = estimated(), llama.CALL_TOKENS
    print(f"A token of {MODEL} at degree {DEGREE} over {KEYS} keys, ms, estimated:")
    for name, ms in (("baseline", costs.baseline), ("llama.py, plain", costs.plain)):
        print(f"{name:28} {ms + costs.host:6.2f}, of which the host's loop {costs.host:.2f}")
    print(f"{f'a call of {tokens} tokens':28} {costs.several:6.2f} without the loop\n")
    print("text           calls  tokens a call  ms a token  times the baseline")
    ratios = []
    for text in texts():
        found = calls(text, tokens)
        ratio = costs.ratio(found)
        ratios += [ratio] if text.kind == "prompt" else []
        name, number = f"{text.kind} {text.number}", found.single + found.several
        print(
            f"{name:14} {number:5}  {found.per_call:13.2f}  {costs.token(found):10.2f}  {ratio:.2f}"
        )
    if args.measure_host:
        (loop, alone), (_, own) = host_ms(False), host_ms(True)
        here = costs._replace(host=loop)
        found = [here.ratio(calls(text, tokens)) for text in texts() if text.kind == "prompt"]
        print(
            f"the adapter's loop here {loop:.2f} ms a token, look-ahead's Python {own - alone:.3f}"
        )
        print(f"with it: median {statistics.median(found):.2f}, worst {min(found):.2f}")
    print(f"without look-ahead {(costs.baseline + costs.host) / (costs.plain + costs.host):.2f}")
    print(f"median {statistics.median(ratios):.2f}, worst {min(ratios):.2f} times the baseline")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
