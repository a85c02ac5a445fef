"""Baseline figures that a score is measured against: the command line's, a file's, the contest's.

`prompt_data.txt` has one row for each prompt of `prompts.txt`: id, prompt tokens, sequence length,
baseline latency in ms, baseline tokens/s, model, source. Lines that begin with # are comments; the
contest's driver reads the first five columns. The contest of 2026 has such a file for each platform
(prompt_data_trn2.csv, with a line of names).
"""

import csv
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from pydantic import NonNegativeInt, TypeAdapter

from harness import console, sdk
from harness.errors import UserError
from harness.figures import benchmark
from harness.figures.benchmark import SpeedReport
from harness.figures.estimated_speed import SpeedEstimates
from harness.figures.evaluation import Speed
from harness.inputs import models
from harness.inputs.schema import Positive
from harness.inputs.submission import REPOSITORY
from harness.model_shapes import MODEL_SHAPES
from harness.processes.worker import Role
from harness.sdk import Source
from harness.session.building import Loaded, build, construct
from harness.session.opening import Session
from harness.settings import Settings
from neuron_cpu.files import write_text_atomically

PROMPTS_FILE = REPOSITORY / "prompts.txt"
PROMPT_DATA_FILE = REPOSITORY / "prompt_data.txt"

# Sequence length -> (latency ms, tokens/s) of the contest's baseline, Llama-3.2-1B on two cores of
# a trn1.2xlarge with SDK 2.21: the defaults of aws-samples/nki-llama main.py, and the first row of
# its prompt_data.txt, which was measured with --seq-len 640 whatever the row says.
CONTEST_MODEL = "llama-3.2-1b"
CONTEST_MODEL_2026 = "qwen3-30b-a3b"
CONTEST_SEQ_LEN = 640  # of every prompt, whatever its row says: --seq-len of both contests' drivers
CONTEST_BASELINE = {64: (526.15, 134.61), 640: (6697.38, 101.53)}


@dataclass(frozen=True)
class Row:
    """One row of prompt_data.txt."""

    index: NonNegativeInt
    prompt_tokens: NonNegativeInt
    seq_len: NonNegativeInt
    latency_ms: Positive
    throughput: Positive
    model: str
    source: Source

    @property
    def speed(self) -> Speed:
        return Speed(self.latency_ms, self.throughput, self.source)


_ROW, _COLUMNS = TypeAdapter(Row), [field.name for field in fields(Row)]


def files_of(contest: Path | None) -> tuple[Path, Path]:
    """Prompts and base times of this repository, or of a contest's clone for the platform that
    NEURON_PLATFORM_TARGET_OVERRIDE names."""
    if contest is None:
        return PROMPTS_FILE, PROMPT_DATA_FILE
    platform = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    several = any(contest.glob("prompt_data_*.csv"))
    data = f"prompt_data_{platform}.csv" if several else PROMPT_DATA_FILE.name
    return contest / PROMPTS_FILE.name, contest / data


def read_rows(path: Path = PROMPT_DATA_FILE) -> list[Row]:
    """The rows in order; a UserError names the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}; name a readable file.") from error
    rows, known = [], CONTEST_MODEL_2026 if path.suffix == ".csv" else CONTEST_MODEL
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith(("#", "Prompt ID,")):
            continue
        cells = zip(_COLUMNS, (cell.strip() for cell in next(csv.reader([line]))))
        try:
            rows.append(
                _ROW.validate_python({"model": known, "source": Source.PUBLISHED} | dict(cells))
            )
        except ValueError as error:
            raise UserError(
                f"{path}, line {number} must hold id, prompt tokens, sequence length, latency ms "
                f"and tokens/s, then perhaps model and source ({', '.join(Source)}), got {line!r}."
            ) from error
    return rows


def write_rows(rows: Sequence[Row], header: Sequence[str], path: Path = PROMPT_DATA_FILE) -> None:
    """Replace the file, comments first."""
    lines = [f"# {line}" for line in header]
    lines += [
        f"{row.index},{row.prompt_tokens},{row.seq_len},{row.latency_ms:.2f},"
        f"{row.throughput:.2f},{row.model},{row.source}"
        for row in rows
    ]
    write_text_atomically(path, "\n".join(lines) + "\n")


def baseline_speed(
    settings: Settings, model_name: str, seq_len: int, row: Row | None = None
) -> Speed | None:
    """Figures to compare with, None where none applies to this model and sequence length."""
    if settings.base_latency is not None and settings.base_throughput is not None:
        return Speed(settings.base_latency, settings.base_throughput, Source.GIVEN)
    if row is not None and row.model == model_name.lower() and row.seq_len == seq_len:
        return row.speed
    if model_name.lower() == CONTEST_MODEL and seq_len in CONTEST_BASELINE:
        return Speed(*CONTEST_BASELINE[seq_len], Source.PUBLISHED)
    return None


# What measures or estimates: (prompt ids, new tokens) -> a report.
Meter = Callable[[list[int], int], SpeedReport]


@dataclass(frozen=True)
class Case:
    """One prompt of a run with the length it runs at and its reference row."""

    index: int
    prompt: str
    ids: list[int]
    seq_len: int
    row: Row | None


def record(session: Session, cases: Sequence[Case]) -> None:
    """Replace prompt_data.txt."""
    with tempfile.TemporaryDirectory() as scratch:
        name, ranks, meter = _meter(session, Path(scratch))
        rows = _rows(name, cases, meter)
    write_rows(rows, _header(session, name, ranks))
    console.say(f"Baseline written to {PROMPT_DATA_FILE}")


def _rows(name: str, cases: Sequence[Case], meter: Meter) -> list[Row]:
    rows = []
    with console.step(f"Recording the baseline of {name}", total=len(cases)) as step:
        for case in cases:
            rows.append(_row(name, case, meter))
            step.advance()
    return rows


def _row(name: str, case: Case, meter: Meter) -> Row:
    if name == CONTEST_MODEL and case.seq_len in CONTEST_BASELINE:
        latency, throughput = CONTEST_BASELINE[case.seq_len]
        source = Source.PUBLISHED
    else:
        report = meter(case.ids, case.seq_len - len(case.ids))
        latency = report.e2e_model["latency_ms_p99"]
        throughput, source = report.e2e_model["throughput"], report.source
    return Row(case.index, len(case.ids), case.seq_len, latency, throughput, name, source)


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


def _known(report: SpeedReport | None) -> SpeedReport:
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
    if name == CONTEST_MODEL:
        lines.append(
            f"Rows marked {Source.PUBLISHED} carry the figures of aws-samples/nki-llama (SDK 2.21, "
            "trn1.2xlarge) for their sequence length."
        )
    return [*lines, "id, prompt tokens, sequence length, latency ms, tokens/s, model, source"]
