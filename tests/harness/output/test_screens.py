"""What the driver prints, in terminals of every width: lines that fit, words and names whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.figures.accuracy import RowResult
from harness.figures.benchmark import SpeedReport
from harness.figures.divergence import Error
from harness.figures.estimate import COLLECTIVE, KERNEL, GraphEstimate
from harness.figures.estimate import Operator as Timed
from harness.figures.evaluation import Evaluation, Figures, Speeds, from_report, score
from harness.figures.graphs import PREFILL, Graph, NkiShare, Operator
from harness.modes import compile, diff
from harness.output import profile_report, report
from harness.sdk import Source
from neuron_cpu.console import terminal

ATTENTION = "attention_prefill_kernel"


def evaluation(index: int) -> Evaluation:
    speed = SpeedReport(
        {"latency_ms_p99": 1234.5678, "latency_ms_avg": 1234.5678, "throughput": 1914.01},
        ttft_ms=0.66371234,
        tokens_per_second=1525.4142,
        source=Source.COST_MODEL,
        new_tokens=102,
        batch_size=1,
        band_ms=(1000.0, 2000.0),
    )
    row = RowResult(True, "", 32, 1.0, 0.0111, 0.999957, 0.315, 40.5)
    scored = score(True, 1.0, from_report(speed), from_report(speed))
    share = NkiShare(1.0, 1.0, ["token_generation_model: lm_head (1.00%)"], [])
    figures = Figures([row], share, Speeds(speed, speed), scored)
    return Evaluation(index, ["Why?"], 1024, 1280, 1, 256, True, None, figures)


def summary() -> None:
    report.print_summary([evaluation(index) for index in (8, 9, 10)], ["Prompt 7 does not fit."])


def result() -> None:
    report.print_result(evaluation(0))


def operator_table() -> None:
    rows = (
        Operator("layers.0.self_attn.rotary_emb", False, "cos, mul, repeat_interleave", 0),
        Operator("layers.0.self_attn", True, ATTENTION, 352_583_680),
    )
    compile.print_operators([Graph(PREFILL, 128, rows)])


def differences() -> None:
    own = [Error("prefill", "layers.10.self_attn", 3.1e-3, 3.4e-3, 0.77)]
    kernels = {("prefill", "layers.10.self_attn"): [ATTENTION, "swiglu_mlp_kernel"]}
    diff.report(own, own, kernels, Path("llama.py"))


@pytest.mark.parametrize("width", [60, 72, 80, 120])
@pytest.mark.parametrize("screen", [summary, result, operator_table, differences])
def test_lines_fit_and_words_stay_whole(
    screen: Callable[[], None], width: int, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    screen()
    words = set(capsys.readouterr().out.split())
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(terminal.sys.stdout, "isatty", lambda: True)
    screen()
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    told = [line for line in lines if set(line) != {"─"}]
    note = next((at for at, line in enumerate(told) if line.startswith("Left out")), len(told))
    shown = {word for line in told[:note] for word in line.split()}
    assert shown <= words, shown - words


def test_rows_of_one_name_are_told_apart() -> None:
    def row(kind: str, name: str, where: str, first: str, count: int, time: float) -> Timed:
        return Timed(kind, name, where, count, time, 0, 0, first=first)

    rows = [
        row(COLLECTIVE, "all-reduce", "layers.*.mlp", "layers.0.mlp", 16, 10.0),
        row(COLLECTIVE, "all-reduce", "layers.*.self_attn", "layers.0.self_attn", 16, 9.0),
        row(KERNEL, ATTENTION, "layers.*.self_attn", "layers.0.self_attn", 1, 8.0),
        row(KERNEL, ATTENTION, "layers.*.self_attn", "layers.1.self_attn", 15, 7.0),
    ]
    table = profile_report._operators(GraphEstimate(PREFILL, 128, 1, rows, 0.0))
    names = list(table.columns[0].cells)[: len(rows)]
    assert set(names) == {
        "all-reduce layers.*.mlp",
        "all-reduce layers.*.self_attn",
        f"{ATTENTION} layers.0.self_attn",
        f"{ATTENTION} layers.*.self_attn",
    }


def test_a_page_opens_on_the_kernel_that_takes_most_time() -> None:
    made = [SimpleNamespace(program=SimpleNamespace(name=name)) for name in ("short", "long")]
    steps = [(KERNEL, "long", "layers.0", 7.0), (KERNEL, "short", "", 9.0)]
    steps += [(KERNEL, "long", "layers.1", 7.0), (COLLECTIVE, "short", "", 50.0)]
    graph = GraphEstimate(PREFILL, 128, 1, [], 0.0, schedules=made, steps=steps)
    labels = [label for label, _ in profile_report._by_time([graph])]
    assert [label.rpartition(" ")[2] for label in labels] == ["long", "short"]
