"""lab/device_profile.py: a device's report becomes a profile, rows of a page and bands."""

import json
import sys
from unittest import mock

import pytest

from lab import device_profile as device
from lab.device import fit, plan, results
from lab.device.rows import ROWS
from neuron_cpu.core.device import spec
from neuron_cpu.core.report import bands
from neuron_cpu.core.time import cost
from neuron_cpu.core.time.schedule import schedule

KERNEL = {
    "module": "lab.device.micro", "kernel": "chain", "arguments": ["128x512:fp32"],
    "keywords": {"n": 1, "engine": "vector"},
}  # fmt: skip


@pytest.fixture
def report(tmp_path, monkeypatch):
    """A report of a device on which VectorE has half of its clock, and places to write to."""
    page = tmp_path / "cost_model.md"
    page.write_text("<!-- devices: begin -->\n<!-- devices: end -->\n")
    monkeypatch.setattr(device.calibrate, "DOCUMENT", page)
    monkeypatch.setattr(device.calibrate, "on_page", lambda row: device.calibrate.Outcome(row))
    monkeypatch.setattr(bands, "DATA", tmp_path / "bands.json")
    monkeypatch.setattr(cost, "MEASURED", tmp_path / "measured")
    monkeypatch.setattr(device, "REPORTS", tmp_path / "devices")
    base = fit.Variant(spec.GEN2)
    values = {name: fit.value_of(spec.GEN2, name) for name in base.names}
    values["clock_hz.VectorE"] /= 2
    found = {
        "generation": "gen2",
        "profile": "sdk2.25",
        "order": None,
        "mechanisms": [],
        "switches": {name: fit.value_of(spec.GEN2, name) for name in fit.SWITCHED},
        "constants": {
            name: {"value": value, "told": True, "before": value, "error": 0.0}
            for name, value in values.items()
        },
        "unexplained": [],
    }
    monkeypatch.setattr(fit, "fit", lambda times, today=False: found)
    estimate = {"us": 30.0, "band_us": [25.0, 45.0], "class": "DMA"}
    entry = {"kind": plan.CONSTANT, "us": {"p50": 60.0}, "estimate": estimate, "status": "measured"}
    path = tmp_path / "report.json"
    results.write(
        path,
        {
            "format": results.FORMAT,
            "source": results.DEVICE,
            "begun": "2026-11-23 10:00",
            "machine": {"instance": "trn1.2xlarge", "target": "trn1"},
            "graphs": {"decode-640": {"kernels": [KERNEL], "us": 1.0}},
            "entries": {
                "vector-chain-512-128": entry,
                "chain decode-640": entry | {"kind": "kernel"},
            },
        },
    )
    return path


def run(*argv):
    with mock.patch.object(sys, "argv", ["device.py", *map(str, argv)]):
        return device.main()


def test_a_device_s_constants_are_a_profile_beside_the_others(report, tmp_path):
    assert run(report, "--write") == 0
    profile = cost.read_profile(json.loads((tmp_path / "measured/trn1-2026-11.json").read_text()))
    program = device.model.program(
        ROWS["vector-chain-512-128"]._asdict() | {"module": KERNEL["module"]}
    )
    before = schedule(program).total
    with mock.patch.dict(cost.PROFILES, {profile.name: profile}):
        assert 1.5 < schedule(program, profile.name).total / before < 2
        with pytest.raises(SystemExit):  # it is there
            run(report, "--write")
    assert schedule(program).total == before
    text = (tmp_path / "cost_model.md").read_text()
    assert "| trn1-2026-11 | chain decode-640 | device | 60.0 | 30.0 |" in text
    assert json.loads(bands.DATA.read_text())["ratios"] == {"trn1-2026-11 chain decode-640": 0.5}


def test_a_profile_that_is_there_is_refused_before_minutes_go_into_a_fit(
    report, capsys, monkeypatch
):
    monkeypatch.setattr(fit, "fit", lambda *_: pytest.fail("fitted"))
    monkeypatch.setitem(cost.PROFILES, "trn1-2026-11", cost.PROFILES[cost.DEFAULT_PROFILE])
    for argv in ((report, "--write"), (report, "--against", report.with_name("none.json"))):
        with pytest.raises(SystemExit) as end:
            run(*argv)
        assert end.value.code == 2
    assert "Profile trn1-2026-11 exists, expected a new one" in capsys.readouterr().err


def test_two_devices_are_compared(report, tmp_path, capsys):
    other = results.read(report)
    other["entries"]["chain decode-640"]["us"] = {"p50": 90.0}
    other["fit"] = fit.fit({})
    results.write(tmp_path / "other.json", other)
    assert run(report, "--against", tmp_path / "other.json") == 0
    assert capsys.readouterr().out.splitlines()[2:] == ["| chain decode-640 | 60 | 90 | 1.50 |"]
    del other["fit"]  # of too few times
    results.write(tmp_path / "other.json", other)
    assert run(report, "--against", tmp_path / "other.json") == 0
    assert "| chain decode-640 | 60 | 90 | 1.50 |" in capsys.readouterr().out


def test_a_rehearsal_is_no_device(report, capsys):
    results.write(report, results.read(report) | {"source": results.REHEARSAL})
    with pytest.raises(SystemExit):
        run(report)
    assert "is a rehearsal without a device" in capsys.readouterr().err
