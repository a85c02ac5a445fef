"""Generation times on Trainium as the cost model estimates them, in the shape of a measured report.

Works on the stand-in only; on a device there is nothing to estimate.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from harness import sdk
from harness.figures import graphs
from harness.figures.benchmark import Acceptance, SpeedReport
from harness.figures.graphs import CHUNK, DECODE, PREFILL, prompt_calls
from harness.inputs.models import check_folder
from harness.processes.worker import Role
from harness.processes.workers import SubmissionFailed
from harness.sdk import Source
from harness.session.building import Loaded, counting
from harness.session.opening import Session
from harness.simulator import cost

_ESTIMATE = "harness.figures.estimate:graph_milliseconds"
_Times = np.ndarray  # ms: an estimate, and the shortest and longest time of a device that fit it


class SpeedEstimates:
    """Estimates of one loaded model; every graph is scheduled once, when it is first needed."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._counting: Loaded | None = None  # where nothing has been generated
        self._graph_ms: dict[tuple[str, int], _Times] = {}
        self._draft = SpeedEstimates(loaded.draft) if loaded.draft else None

    @property
    def used(self) -> list[tuple[str, int]]:
        """Sub-model and bucket of the graphs that were estimated."""
        return list(self._graph_ms)

    def report(
        self, prompt_tokens: int, new_tokens: int, speculation: Acceptance | None = None
    ) -> SpeedReport | None:
        """Latencies in ms and tokens/s of one generation; None where there is no cost model.

        Under speculation a token costs its share of a step, by the measured tokens a step.

        One deterministic run, so all percentiles would be the same number: `latency_ms_p99` and
        `latency_ms_avg` stand for them.
        """
        if not sdk.platform().simulates:
            return None
        first, steps = self._prompt(prompt_tokens), new_tokens - 1
        later = sum(
            (self._token(prompt_tokens + step + 1, speculation) for step in range(steps)),
            np.zeros(3),
        )
        batch = self._loaded.session.settings.batch_size
        total, shortest, longest = (first + later).tolist()
        prefill, decode = float(first[0]), float(later[0])
        mean = decode / steps if steps else 0.0
        return SpeedReport(
            e2e_model=_entry(total, (prompt_tokens + new_tokens) * batch, total),
            context_encoding_model=_entry(prefill, prompt_tokens * batch, prefill),
            token_generation_model=_entry(mean, steps * batch, decode) if steps else None,
            ttft_ms=prefill,
            tokens_per_second=1000 * batch / mean if steps else None,
            source=Source.COST_MODEL,
            new_tokens=new_tokens,
            batch_size=batch,
            band_ms=(shortest, longest),
            speculation=speculation,
            plain_ms=self._plain(prompt_tokens, steps) if speculation else None,
        )

    def _plain(self, prompt_tokens: int, steps: int) -> float | None:
        """A token of a submission that looks ahead by itself, if it did not."""
        if self._loaded.session.settings.speculation is not None or not steps:
            return None
        alone = [self._graph(DECODE, prompt_tokens + step + 1)[0] for step in range(steps)]
        return float(np.mean(alone))

    def _prompt(self, tokens: int) -> _Times:
        """Every call up to the first new token, the draft model's, too."""
        buckets = self._loaded.buckets
        calls = prompt_calls(
            tokens,
            buckets[PREFILL][-1],
            self._loaded.session.settings.prefill_chunk if CHUNK in buckets else None,
            buckets.get(DECODE, buckets[PREFILL])[-1],
        )
        own = np.sum([self._graph(*call) for call in calls], axis=0)
        return own + self._draft._prompt(tokens) if self._draft else own

    def _token(self, position: int, speculation: Acceptance | None) -> _Times:
        """One token that stands at `position` once it is cached."""
        asked = self._loaded.session.settings.speculation
        if speculation is None or not speculation.calls:
            return self._graph(DECODE, position)
        alone, submodel = 0.0, CHUNK if asked is None else asked.submodel
        if DECODE in self._loaded.buckets:
            alone = speculation.unguessed / speculation.calls
        call = (1 - alone) * self._graph(submodel, position + speculation.length - 1)
        if alone:
            call += alone * self._graph(DECODE, position)
        if self._draft:
            steps = speculation.draft_calls / speculation.calls
            call += steps * self._draft._graph(DECODE, position)
        each = call / speculation.tokens_per_call
        if asked is not None:
            return each
        # the loop around a submission that looks ahead takes its time for each token
        around, answered = cost.Overheads(), 1 - 1 / speculation.tokens_per_call
        return each + answered * (around.argmax_ns + around.host_ns) / 1e6

    def _graph(self, submodel: str, length: int) -> _Times:
        """Times of one execution of the bucket that holds `length` tokens."""
        buckets = self._loaded.buckets[submodel]
        key = submodel, next((bucket for bucket in buckets if bucket >= length), buckets[-1])
        if key not in self._graph_ms:
            self._graph_ms[key] = self._estimate(*key)
        return self._graph_ms[key]

    def _estimate(self, submodel: str, bucket: int) -> _Times:
        what = f"{submodel}, bucket {bucket} cannot be estimated"
        if self._counting is None:
            self._counting = counting(self._loaded)
        found: Any = self._counting.call(_ESTIMATE, what, submodel=submodel, bucket=bucket).body
        times = found.get("ms") if isinstance(found, dict) else None
        if (
            type(times) is not list
            or len(times) != 3
            or not all(type(ms) is float and math.isfinite(ms) and ms > 0 for ms in times)
        ):
            raise SubmissionFailed(f"{what}: expected three times in ms, got {str(found)[:80]}.")
        if self._loaded.role != Role.BASELINE:
            self._check(submodel, bucket, times[0], found)
        return np.array(times)

    def _check(self, submodel: str, bucket: int, milliseconds: float, found: Any) -> None:
        """Refuse impossible figures, and counts that differ from the compiled graph's."""
        graphs.check_time(self._session(), submodel, bucket, milliseconds)
        compiled = graphs.bucket_of(graphs.read(self._loaded.folder), submodel, bucket)
        programs = Counter[str]() if compiled is None else compiled.programs
        known = None if compiled is None else [compiled.macs, compiled.nki_macs]
        for what, there, here in (
            ("MACs, in all and in kernels,", known, found.get("macs")),
            ("calls of kernels' programs", dict(programs), found.get("programs")),
        ):
            if here != there:
                raise SubmissionFailed(
                    f"{submodel}, bucket {bucket}: traced anew it has {str(here)[:400]} "
                    f"{what} and {there} where it was compiled; a model must be the same every "
                    "time."
                )

    def _session(self) -> Session:
        """The session with this model's own sizes."""
        session = self._loaded.session
        asked = session.settings.speculation
        if self._loaded.role != Role.DRAFT or asked is None or asked.own_draft is None:
            return session
        return replace(session, model=check_folder(asked.own_draft))


def _entry(latency_ms: float, tokens: int, total_ms: float) -> dict[str, float]:
    return {
        "latency_ms_p99": latency_ms,
        "latency_ms_avg": latency_ms,
        "throughput": 1000 * tokens / total_ms,
    }
