"""What the driver prints, in terminals of every width: lines that fit, words and names whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.figures.accuracy import RowResult
from harness.figures.benchmark import SpeedReport
from harness.figures.divergence import Error
from harness.figures.evaluation import Evaluation, Figures, Speeds, from_report, score
from harness.figures.graphs import PREFILL, Graph, NkiShare, Operator
from harness.modes import compile, diff
from harness.output import report
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
