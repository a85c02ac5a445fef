"""How long generation takes: the NxDI report's keys, with the time to the first token beside them.

The clock is the driver's: it reads the arrival of every step's tokens, outside of the submission's
process. Wall-clock times on the stand-in are the simulator's own: every report carries a `source`,
and nothing here mixes sources.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness import sdk
from harness.files import read_reference, reference_file, write_reference
from harness.processes.worker import BASELINES
from harness.processes.workers import SubmissionFailed
from harness.sdk import Source
from harness.session.building import Loaded, identity
from harness.session.generation import generate_tokens, speculative_tokens
from harness.streaming import Stream
from neuron_cpu.errors import UnwritableError

_LOOKED = "harness.session.model:looked"
_PERCENTILES = (50, 90, 95, 99, 100)


Calls = Sequence[Sequence[int]]  # of each: tokens guessed, guesses that were right, draft steps


@dataclass(frozen=True)
class Acceptance:
    """Speculation in one generation or more.

    Attributes:
        method: who guessed.
        length: tokens that a call of several takes.
        calls: of the model behind prefills, and `unguessed` those of them without a guess.
        tokens: that came out of the calls.
        offered: guesses at each place behind the newest token, the first one first.
        accepted: those of them that were right, and all before them, too.
        draft_calls: single-token steps of the draft model.
    """

    method: str
    length: int
    calls: int
    unguessed: int
    tokens: int
    offered: list[int]
    accepted: list[int]
    draft_calls: int = 0

    @property
    def tokens_per_call(self) -> float:
        return self.tokens / self.calls if self.calls else 1.0

    def describe(self) -> str:
        """One sentence for the terminal."""
        places = ", ".join(
            f"{right / count:.0%} of {count}"
            for right, count in zip(self.accepted, self.offered)
            if count
        )
        return (
            f"speculation ({self.method}, {self.length} tokens a step): "
            f"{self.tokens_per_call:.2f} tokens a step accepted over {self.calls} steps, "
            f"{self.unguessed} of them without a guess; right by position: {places or 'none'}"
        )


@dataclass(frozen=True)
class SpeedReport:
    """One generation's speed, measured or estimated; fields are the keys of its JSON.

    Attributes:
        e2e_model, context_encoding_model, token_generation_model: latencies in ms (NxDI's keys
            `latency_ms_p50` and so on) and `throughput` in tokens/s; None where none ran.
        ttft_ms: time to the first token.
        tokens_per_second: after the first one, of all rows; None with fewer than two.
        runs: measured ones; None of an estimate, which needs one.
        band_ms: of an estimate, the shortest and longest whole generation of a device that fit it
            (docs/cost_model.md).
        speculation: what guesses were worth; of an estimate, those that were measured here.
        plain_ms: of an estimate of look-ahead, a token without it.
    """

    e2e_model: dict[str, float]
    context_encoding_model: dict[str, float] | None = field(default=None, kw_only=True)
    token_generation_model: dict[str, float] | None = field(default=None, kw_only=True)
    ttft_ms: float
    tokens_per_second: float | None
    source: Source
    new_tokens: int
    batch_size: int
    runs: int | None = None
    band_ms: tuple[float, float] | None = None
    speculation: Acceptance | None = None
    plain_ms: float | None = None


def runs_asked(runs: int | None) -> int:
    """How often to repeat a measurement."""
    return runs or sdk.platform().runs


def latency_report(seconds: Sequence[float], tokens: int, batch: int) -> dict[str, float]:
    """NxDI's report of one list of latencies; `tokens` per run and row count for throughput."""
    report = {
        f"latency_ms_p{percentile}": float(np.percentile(seconds, percentile)) * 1000
        for percentile in _PERCENTILES
    }
    report["latency_ms_avg"] = float(np.mean(seconds)) * 1000
    report["throughput"] = len(seconds) * tokens * batch / sum(seconds)
    return report


def measure(
    loaded: Loaded,
    prompt_ids: Sequence[Sequence[int]],
    new_tokens: int,
    runs: int,
    on_step: Callable[[list[int]], Any] | None = None,
    warm_up: bool = True,
) -> SpeedReport:
    """Generate `new_tokens` for a batch `runs` times and report as NxDI's benchmark does.

    Times to the first token and rates are medians over the runs. The first step is prefill, the
    others are decode, each with the host's work before the next. End tokens are suppressed so that
    every run has the same length.
    """

    def generate(stream: Stream | None) -> None:
        def step(tokens: list[int], seconds: float) -> None:
            if stream is not None:
                stream.step(tokens, seconds)
            if on_step is not None:
                on_step(tokens)

        if asked is None:
            generate_tokens(loaded, prompt_ids, new_tokens, step, fixed_length=True)
            return
        tokens, body = speculative_tokens(loaded, prompt_ids, new_tokens, step)
        if stream is not None:
            calls.append((checked_calls(body, asked.length, tokens), tokens))

    # the baseline never guesses
    asked = None if loaded.role in BASELINES else loaded.session.settings.speculation
    calls: list[tuple[Calls, int]] = []
    if warm_up:
        generate(None)
    streams, latencies = [], []
    for _ in range(runs):
        stream = silent_stream(loaded, len(prompt_ids))
        generate(stream)
        streams.append(stream)
        latencies.append(time.monotonic() - stream.started)
    width, batch = max(len(ids) for ids in prompt_ids), len(prompt_ids)
    report = timed(streams, latencies, width, new_tokens, batch)
    spoken = summed(asked.method, asked.length, calls) if asked else None
    return replace(report, speculation=spoken)


def looked_ahead(
    loaded: Loaded, ids: Sequence[int], new_tokens: int, on_step: Callable[[], Any]
) -> Acceptance | None:
    """What the guesses of a submission give that looks ahead by itself, over all `new_tokens` of
    an answer: its first ones repeat less than the rest. The calls stay in the cache, under a digest
    of everything that went into them."""
    asked = loaded.session.settings
    wanted: dict[str, Any] = dict(
        top_k=asked.top_k, top_p=asked.top_p, temperature=asked.temperature
    )
    wanted |= dict(ids=list(ids), tokens=new_tokens, seed=asked.seed, model=identity(loaded))
    file = reference_file(wanted)
    if (known := read_reference(file)) is not None:
        for _ in range(new_tokens):
            on_step()
        return of_calls(known[0])
    what = "The graphs' calls cannot be counted"
    loaded.call(_LOOKED, what)  # those of earlier generations
    generate_tokens(loaded, [ids], new_tokens, lambda *_: on_step(), fixed_length=True)
    body = loaded.call(_LOOKED, what).body
    found = of_calls(body)
    with contextlib.suppress(UnwritableError):  # the run goes on without
        write_reference(file, body, [])
    return found


def silent_stream(loaded: Loaded, rows: int) -> Stream:
    """A stream that keeps the times of one generation and writes nothing."""
    return Stream(loaded.session.tokenizer, [], [""] * rows, lambda _: None)


def timed(
    streams: Sequence[Stream], latencies: Sequence[float], width: int, new_tokens: int, batch: int
) -> SpeedReport:
    """The report of generations that have ended: `latencies` are their seconds as a whole."""
    first = [stream.first_seconds for stream in streams]
    later = [seconds for stream in streams for seconds in stream.step_seconds[1:]]
    decode = None
    if later:
        decode = latency_report(later, 1, batch)
    speeds = [stream.tokens_per_second for stream in streams if stream.tokens_per_second]
    return SpeedReport(
        e2e_model=latency_report(latencies, width + new_tokens, batch),
        context_encoding_model=latency_report(first, width, batch),
        token_generation_model=decode,
        ttft_ms=float(np.median(first)) * 1000,
        tokens_per_second=float(np.median(speeds)) * batch if speeds else None,
        source=sdk.platform().times,
        new_tokens=new_tokens,
        batch_size=batch,
        runs=len(streams),
    )


def checked_calls(body: Any, length: int, tokens: int) -> Calls:
    """The calls of one generation of `tokens` tokens as its process tells them.

    Each gives its right guesses and one more token, the last one perhaps without that.
    """
    whole = isinstance(body, list) and all(
        isinstance(call, list)
        and len(call) == 3
        and all(type(number) is int for number in call)
        and 0 <= call[1] <= call[0] < length
        and call[2] >= 0
        for call in body
    )
    if not whole or sum(call[1] + 1 for call in body) - (tokens - 1) not in (0, 1):
        raise SubmissionFailed(
            f"The model fails while it generates: {str(body)[:80]} are no calls that give {tokens} "
            f"tokens with at most {length - 1} guesses each."
        )
    return body


def of_calls(body: Any) -> Acceptance | None:
    """Acceptance of a submission that looks ahead by itself, in its first generation of `body`, by
    the calls of its graphs that the driver has seen; None where no call took several tokens."""
    calls = body[0] if isinstance(body, list) and body else []
    tokens = 1 + sum(call[1] + 1 for call in calls)
    length = 1 + max((call[0] for call in calls), default=0)
    if length == 1:
        return None
    return summed("look-ahead", length, [(checked_calls(calls, length, tokens), tokens)])


def summed(method: str, length: int, generations: Sequence[tuple[Calls, int]]) -> Acceptance:
    """Acceptance over several generations: of each its calls and its number of tokens."""
    calls = [call for own, _ in generations for call in own]
    places = range(length - 1)
    return Acceptance(
        method=method,
        length=length,
        calls=len(calls),
        unguessed=sum(guessed == 0 for guessed, _, _ in calls),
        tokens=sum(tokens - 1 for _, tokens in generations),
        offered=[sum(guessed > place for guessed, _, _ in calls) for place in places],
        accepted=[sum(agreed > place for _, agreed, _ in calls) for place in places],
        draft_calls=sum(drafted for _, _, drafted in calls),
    )
