"""`--record-baseline`: write prompt_data.txt from the baseline's own figures.

On a device they are measured. On the stand-in they are estimates, which need shapes only:
`--profile-model llama-3.2-1b` names the model of the contest, whose weights are gated. Rows that
the contest has published figures for carry those.
"""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import console, sdk
from harness.errors import UserError
from harness.figures import benchmark, reference
from harness.figures.benchmark import PUBLISHED
from harness.figures.estimated_speed import SpeedEstimates
from harness.inputs import models
from harness.inputs.model_shapes import MODEL_SHAPES
from harness.inputs.submission import MODEL_CLASS
from harness.session.building import BASELINE_MODULE, Loaded, Session, build, construct_model

# What measures or estimates: (prompt ids, new tokens) -> a report as `benchmark` makes them.
Meter = Callable[[list[int], int], dict[str, Any]]


def record(session: Session, cases: Sequence[Any]) -> None:
    """Replace prompt_data.txt; `cases` have `index`, `ids` and `seq_len` (`evaluate_all.Case`)."""
    name, meter = _meter(session)
    rows = []
    with console.step(f"Recording the baseline of {name}", total=len(cases)) as step:
        for case in cases:
            rows.append(_row(name, case, meter))
            step.advance()
    reference.write_rows(rows, _header(session, name))
    console.say(f"Baseline written to {reference.PROMPT_DATA_FILE}")


def _row(name: str, case: Any, meter: Meter) -> reference.Row:
    if name == reference.CONTEST_MODEL and case.seq_len in reference.CONTEST_BASELINE:
        latency, throughput = reference.CONTEST_BASELINE[case.seq_len]
        source = PUBLISHED
    else:
        report = meter(case.ids, case.seq_len - len(case.ids))
        latency = report["e2e_model"]["latency_ms_p99"]
        throughput, source = report["e2e_model"]["throughput"], report["source"]
    tokens = len(case.ids)
    return reference.Row(case.index, tokens, case.seq_len, latency, throughput, name, source)


def _meter(session: Session) -> tuple[str, Meter]:
    """The name of the model whose baseline is recorded, and what gives its figures."""
    if session.args.profile_model is not None:
        if not sdk.is_stand_in():
            raise UserError("--profile-model has no weights to measure; give --model-path.")
        name = session.args.profile_model
        estimates = SpeedEstimates(_without_weights(session, name))
        return name, lambda ids, count: _known(estimates.report(len(ids), count))
    loaded = build(session, "baseline")
    name = session.model.name.lower()
    if sdk.is_stand_in():
        own = SpeedEstimates(loaded)
        return name, lambda ids, count: _known(own.report(len(ids), count))
    return name, lambda ids, count: benchmark.measure(loaded, [ids], count, benchmark.DEVICE_RUNS)


def _known(report: Any) -> dict[str, Any]:
    """An estimate on the stand-in, where there always is one."""
    assert report is not None
    return report


def _without_weights(session: Session, name: str) -> Loaded:
    """The baseline of a public configuration, built from its shapes, on two ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(MODEL_SHAPES[name]), encoding="utf-8")
        shapes = models.ModelFolder(folder, name, MODEL_SHAPES[name])
        session.args.tp_degree = models.choose_tp_degree(shapes, None, False)
        opened = Session(session.args, shapes, session.submission, None, session.pad_token_id)
        model_class = getattr(importlib.import_module(BASELINE_MODULE), MODEL_CLASS)
        model = construct_model(opened, model_class, "baseline")
    return Loaded(opened, "baseline", model, folder, None)


def _header(session: Session, name: str) -> list[str]:
    where = "estimated by the cost model of neuron_cpu" if sdk.is_stand_in() else "measured here"
    lines = [
        f"Baseline of {name}, {time.strftime('%Y-%m-%d', time.gmtime())}, --tp-degree "
        f"{session.args.tp_degree}, batch size {session.args.batch_size}: {where}.",
        f"Prompt tokens are those of {session.model.name}.",
    ]
    if name == reference.CONTEST_MODEL:
        lines.append(
            f"Rows marked {PUBLISHED} carry the figures of aws-samples/nki-llama (SDK 2.21, "
            "trn1.2xlarge) for their sequence length."
        )
    return [*lines, "id, prompt tokens, sequence length, latency ms, tokens/s, model, source"]
