"""`--record-baseline`: write prompt_data.txt from the baseline's own figures.

On a device they are measured. On the stand-in they are estimates, which need shapes only:
`--profile-model llama-3.2-1b` names the model of the contest, whose weights are gated. Rows for
which the contest has published figures carry the published ones.
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from harness import console, sdk
from harness.errors import UserError
from harness.figures import benchmark, reference
from harness.figures.benchmark import SpeedReport
from harness.figures.estimated_speed import SpeedEstimates
from harness.inputs import models
from harness.model_shapes import MODEL_SHAPES
from harness.processes.roles import Role
from harness.session.building import Loaded, build, construct
from harness.session.opening import Session
from harness.sources import Source

# What measures or estimates: (prompt ids, new tokens) -> a report.
Meter = Callable[[list[int], int], SpeedReport]


@dataclass(frozen=True)
class Case:
    """One prompt of a run with the length it runs at and its reference row."""

    index: int
    prompt: str
    ids: list[int]
    seq_len: int
    row: Optional[reference.Row]


def record(session: Session, cases: Sequence[Case]) -> None:
    """Replace prompt_data.txt."""
    with tempfile.TemporaryDirectory() as scratch:
        name, ranks, meter = _meter(session, Path(scratch))
        rows = _rows(name, cases, meter)
    reference.write_rows(rows, _header(session, name, ranks))
    console.say(f"Baseline written to {reference.PROMPT_DATA_FILE}")


def _rows(name: str, cases: Sequence[Case], meter: Meter) -> list[reference.Row]:
    rows = []
    with console.step(f"Recording the baseline of {name}", total=len(cases)) as step:
        for case in cases:
            rows.append(_row(name, case, meter))
            step.advance()
    return rows


def _row(name: str, case: Case, meter: Meter) -> reference.Row:
    if name == reference.CONTEST_MODEL and case.seq_len in reference.CONTEST_BASELINE:
        latency, throughput = reference.CONTEST_BASELINE[case.seq_len]
        source = Source.PUBLISHED
    else:
        report = meter(case.ids, case.seq_len - len(case.ids))
        latency = report.e2e_model["latency_ms_p99"]
        throughput, source = report.e2e_model["throughput"], report.source
    tokens = len(case.ids)
    return reference.Row(case.index, tokens, case.seq_len, latency, throughput, name, source)


def _meter(session: Session, scratch: Path) -> tuple[str, int, Meter]:
    """The model whose baseline is recorded, its ranks, and the function that gives its figures."""
    chosen = session.settings.profile_model
    here = sdk.platform()
    if chosen is not None and not here.simulates:
        raise UserError("--profile-model has no weights to measure; give --model-path.")
    loaded = (
        build(session, Role.BASELINE)
        if chosen is None
        else _without_weights(session, chosen, scratch)
    )
    name, ranks = loaded.session.model.name.lower(), loaded.session.settings.tp_degree or 1
    if here.simulates:
        own = SpeedEstimates(loaded)
        return name, ranks, lambda ids, count: _known(own.report(len(ids), count))
    return name, ranks, lambda ids, count: benchmark.measure(loaded, [ids], count, here.runs)


def _known(report: Optional[SpeedReport]) -> SpeedReport:
    """An estimate on the stand-in, where there always is one."""
    assert report is not None
    return report


def _without_weights(session: Session, name: str, folder: Path) -> Loaded:
    """The baseline of a public configuration, built from its shapes, on two ranks."""
    (folder / "config.json").write_text(json.dumps(MODEL_SHAPES[name]), encoding="utf-8")
    shapes = models.ModelFolder(folder, name, MODEL_SHAPES[name])
    ranks = models.choose_tp_degree(shapes, None, sdk.platform().default_ranks)
    return construct(replace(session.changed(tp_degree=ranks), model=shapes), Role.BASELINE)


def _header(session: Session, name: str, ranks: int) -> list[str]:
    lines = [
        f"Baseline of {name}, {time.strftime('%Y-%m-%d', time.gmtime())}, --tp-degree "
        f"{ranks}, batch size {session.settings.batch_size}: {sdk.platform().baseline_figures}.",
        f"Prompt tokens are those of {session.model.name}.",
    ]
    if name == reference.CONTEST_MODEL:
        lines.append(
            f"Rows marked {Source.PUBLISHED} carry the figures of aws-samples/nki-llama (SDK 2.21, "
            "trn1.2xlarge) for their sequence length."
        )
    return [*lines, "id, prompt tokens, sequence length, latency ms, tokens/s, model, source"]
