"""Progress where there is no terminal to draw a bar on."""

from __future__ import annotations

import itertools

import pytest
import torch

from harness import console
from harness.processes import worker
from neuron_cpu.console import progress


def test_without_a_terminal_lines_tell_the_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    with console.step("Working", total=4) as step:
        step.advance()
        step.note("Working harder")
        step.advance(2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["Working: 25 %", "Working harder: 75 %"]
    assert len(lines) == 3 and lines[2].startswith("Working harder: ") and lines[2].endswith(" s")


def test_records_of_the_stand_in_are_in_these_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    with console.step("Reading"):
        for done in (512, 1024, 2048):
            progress.report("prompt", done, 2048)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["Reading: prompt 25 %", "Reading: prompt 50 %"] and len(lines) == 3


def test_a_step_in_which_nothing_ends_says_that_it_goes_on(capsys) -> None:
    with console.step("Working", total=4) as step:
        step.still()  # a moment ago it began
        step._said -= console.STILL_SECONDS
        step.still()
        step.still()
    assert capsys.readouterr().err.splitlines()[0] == "Working: 0 %, 0 s so far"


def test_a_long_call_tells_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple] = []
    monkeypatch.setattr(worker.progress, "report", lambda *given: told.append(given))
    clock = itertools.count(0, 0.6)
    monkeypatch.setattr(worker.time, "monotonic", lambda: next(clock))
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Identity()] * 4)})
    with worker.layers_told(model):
        for layer in model["layers"]:
            layer(torch.zeros(1))
    assert told and all(total == 4 for _, _, total in told) and not layer._forward_hooks


def test_status_lines_move_no_cursor(capsys: pytest.CaptureFixture) -> None:
    console.say("boom \x1b[2J\rbang\u202e")
    assert capsys.readouterr().err == "boom \\x1b[2J\\rbang\\u202e\n"
