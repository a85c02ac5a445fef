"""Reports that strangers send: a sentence for each, and nothing of theirs is called or written."""

import copy
import json
import os
import random
import sys
from unittest import mock

import pytest

from harness.errors import UserError
from lab import device_profile as device
from lab.device import calls, page, results
from lab.device.rows import ROWS

TENSOR = ["128x512:fp32"]
NAMED = {"n": 1, "engine": "vector"}
CALL = {"module": calls.MICRO, "kernel": "chain", "arguments": TENSOR, "keywords": NAMED}
TIMED = {
    "kind": "constant", "status": "measured", "us": {"p50": 60.0}, "seconds": 1.0,
    "estimate": {"us": 30.0, "band_us": [20.0, 40.0], "class": "DMA"},
}  # fmt: skip
REPORT = {
    "format": results.FORMAT, "source": "device", "begun": "2026-11-23 10:00",
    "machine": {"instance": "trn1.2xlarge", "target": "trn1", "chips": "[\n\t{}]"},
    "graphs": {"decode-640": {"kernels": [CALL], "us": 1.0}},
    "entries": {
        **dict.fromkeys(list(ROWS)[:30], TIMED), "small decode-640": TIMED | {"kind": "kernel"},
        "construct nl.silu": {"kind": "construct", "status": "refused", "words": "no",
                              "constructs": ["nl.silu"]},
        "small: numbers": {"kind": "numbers", "status": "wrong", "equal": 0.5, "error": 1.0,
                           "exact": True},
    },
}  # fmt: skip


def read(report, path):
    path.write_text(report if isinstance(report, str) else json.dumps(report))
    return results.read(path)


def test_an_honest_report_is_read(tmp_path):
    found = read(REPORT, tmp_path / "r.json")
    assert "refuses 1 of 1 probes of constructs (nl.silu)" in page.page(found)


@pytest.mark.parametrize("module", ["os", "subprocess", "/tmp/mine.py", "../mine.py", 7, None])
def test_a_report_names_no_module_that_is_not_the_projects(module, tmp_path):
    graphs = {"decode-640": {"kernels": [CALL | {"module": module}], "us": 1.0}}
    with pytest.raises(UserError, match="kernels of other modules|no report"):
        read(REPORT | {"graphs": graphs}, tmp_path / "r.json")


@pytest.mark.parametrize("kind", ["Path", "module", "run", "Seeded", "submission"])
def test_an_argument_is_made_by_no_function(kind):
    with pytest.raises(UserError, match="expected a tuple's class"):
        calls.read({"type": kind, "values": ["os"]}, calls, calls.shapes)


@pytest.mark.parametrize(
    "changed",
    [
        {"machine": {"instance": "x", "target": "../../../../tmp/x"}}, {"begun": "../../x"},
        {"machine": {"instance": "\x1b[2J", "target": "trn1"}}, {"format": 2}, {"source": "x"},
        {"entries": {"\x1b]0;x\x07": TIMED}}, {"entries": {"x": TIMED | {"us": {"p50": -1}}}},
        {"entries": {"x": TIMED | {"us": {"p50": float("nan")}}}}, {"entries": [TIMED]},
        {"entries": {"x": TIMED | {"us": {"p50": "1"}}}}, {"entries": {"x": TIMED | {"us": 3}}},
        {"entries": {"x": TIMED | {"kind": "other"}}, "graphs": 7}, {"entries": {"x": None}},
        {"entries": {"x": {"kind": "kernel"}}}, {"graphs": {"decode-640": {"kernels": 3}}},
        {"fit": {"constants": 3}}, {"fit": [1]}, {"machine": []}, {"begun": None},
    ],
)  # fmt: skip
def test_a_report_of_another_form_is_refused(changed, tmp_path):
    with pytest.raises(UserError, match="is no report of lab.device_report"):
        read(REPORT | changed, tmp_path / "r.json")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 99_999, "null", "7", '{"format": 1}', "\x00", '"' + "x" * 99]
)
def test_bytes_that_are_no_report_get_a_sentence(text, tmp_path):
    with pytest.raises(UserError):
        read(text, tmp_path / "r.json")


def test_a_file_that_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="not a regular file"):
        results.read(tmp_path / "fifo")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="more than"):
        results.read(tmp_path / "huge")


def mutated(chosen):
    """A report of which one place holds something else."""
    made = copy.deepcopy(REPORT)
    place, way = made, None
    while isinstance(place, (dict, list)) and place and (way is None or chosen.random() < 0.8):
        way = place, chosen.choice(list(place) if isinstance(place, dict) else range(len(place)))
        place = way[0][way[1]]
    odd = [None, "", -1, 1e308, [], {}, True, "\x1b[2J", 2**70, ["x"] * 9, {"p50": {}}, "../x"]
    way[0][way[1]] = chosen.choice(odd)
    return made


def test_a_stranger_s_report_ends_calibration_with_a_sentence(tmp_path, monkeypatch, capsys):
    """Whatever it holds: status 2 and a sentence, or what it says; no file beside the named one."""
    found = {"constants": {}, "mechanisms": [], "profile": "sdk2.25", "order": None}
    monkeypatch.setattr(device.fit, "fit", lambda times: found)
    chosen = random.Random(31)
    for _ in range(300):
        path = tmp_path / "r.json"
        path.write_text(json.dumps(mutated(chosen)))
        with mock.patch.object(sys, "argv", ["device.py", str(path), "--against", str(path)]):
            try:
                assert device.main() == 0
            except SystemExit as end:
                assert end.code == 2
        assert "Traceback" not in capsys.readouterr().err
        assert [one.name for one in tmp_path.iterdir()] == ["r.json"]


def test_names_that_this_project_does_not_measure_are_told(tmp_path, capsys):
    (tmp_path / "r.json").write_text(json.dumps(REPORT | {"entries": {"mine": TIMED}}))
    argv = mock.patch.object(sys, "argv", ["device.py", str(tmp_path / "r.json")])
    with argv, pytest.raises(SystemExit):
        device.main()
    assert "nothing can be fitted" in capsys.readouterr().err
