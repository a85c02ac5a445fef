"""The report of a device that the stand-in plays, its faults included."""

import json
import time
from unittest import mock

import pytest

from harness.errors import UserError
from harness.files import locked_folder
from lab.device import hour, page, plan, results
from lab.device.probes import PROBES
from lab.device.rows import ROWS
from lab.device.running import Unanswered
from tests.lab import played

ROW_NAMES = ("launches-33", "small", "rows-512", "vector-chain-1-32", "scalar-stream-1-32")


@pytest.fixture(params=[("trn1", None), ("trn2", "2.33")], ids=["trn1", "trn2 in nki"])
def some(request, monkeypatch):
    """A plan of a few entries, on a played device of either language."""
    target, release = request.param
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    if release:
        monkeypatch.setenv("NEURON_CPU_NKI", release)
    monkeypatch.setattr(hour, "Workers", played.Workers)
    monkeypatch.setattr(plan, "GRAPHS_OF_1B", ())
    entries = [plan.of_row(ROWS[name], bool(release)) for name in ROW_NAMES]
    entries += [plan.construct(name, bool(release)) for name in list(PROBES[bool(release)])[:3]]
    for name in ("small", "rows-4"):
        call = plan.of_row(ROWS[name], bool(release)).call
        entries.append(plan.Entry(f"{name}: numbers", plan.NUMBERS, plan.XLA, call, exact=True))
    monkeypatch.setattr(plan, "entries", lambda *_: iter(entries))

    def device(**faults):
        made = played.Device(1, None, faults, target, bool(release))
        monkeypatch.setattr(played.Workers, "device", made)

    device()
    return device


def told(report):
    """The constructs of each probe."""
    every = report["entries"].values()
    return [entry["constructs"] for entry in every if entry["kind"] == plan.CONSTRUCT]


def test_times_differ_from_estimates_as_the_device_s_constants_do(some, tmp_path):
    path = tmp_path / "report.json"
    hour.run(path, 60)
    found = results.read(path)
    assert set(found["entries"]) >= set(ROW_NAMES)
    timed = [found["entries"][name] for name in ROW_NAMES]
    assert all(entry["status"] == hour.MEASURED for entry in timed)
    assert max(abs(one["us"]["p50"] / one["estimate"]["us"] - 1) for one in timed) > 0.05
    tried = told(found)
    assert len(tried) == 3 and all(tried)
    assert found["entries"]["rows-4: numbers"]["equal"] == 1.0
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert len(found["sentences"]) == 4 and all(one in text for one in found["sentences"])
    assert {"instance", "chips", "target", "system", "language", "project", "packages"} == set(
        found["machine"]
    )
    for entry in timed:
        low, high = entry["estimate"]["band_us"]
        assert low <= entry["estimate"]["us"] <= high
    assert "A rehearsal" in text and "| scalar-stream-1-32 |" in text
    seen = len(set().union(*tried))
    assert f"refuses 0 of 3 probes of constructs, and {seen} constructs are seen now" in text
    assert text.count("| seen |") == 3 and all(one in text for one in set().union(*tried))


def test_a_kernel_that_is_refused_hangs_dies_or_is_wrong_is_one_result(some, tmp_path):
    some(
        **{
            "vector-chain-1-32": "refused",
            "small": "hung",
            "launches-33": "died",
            "rows-4": "wrong",
        }
    )
    path = tmp_path / "report.json"
    entries = hour.run(path, 60)["entries"]
    statuses = {name: entry["status"] for name, entry in entries.items()}
    assert statuses["vector-chain-1-32"] == "refused"
    assert (statuses["small"], statuses["small: numbers"]) == ("hung", "hung")
    assert statuses["launches-33"] == "died"
    assert statuses["rows-4: numbers"] == "wrong" and entries["rows-4: numbers"]["equal"] < 1
    assert statuses["rows-512"] == hour.MEASURED
    assert "Results that are not the simulator's: rows-4: numbers." in page.page(results.read(path))


def test_a_run_that_is_cut_off_goes_on_and_comes_last_to_what_it_was_at(
    some, tmp_path, monkeypatch
):
    path = tmp_path / "report.json"
    ask, count = played.Workers.ask, 0

    def cut(self, role, *asked):
        nonlocal count
        count += role != "simulator"
        if count == 3:
            raise KeyboardInterrupt
        return ask(self, role, *asked)

    monkeypatch.setattr(played.Workers, "ask", cut)
    with pytest.raises(KeyboardInterrupt):
        hour.run(path, 60)
    before = results.read(path)["entries"]
    assert [entry["status"] for entry in before.values()] == ["measured"] * 2 + ["unfinished"]
    monkeypatch.setattr(played.Workers, "ask", ask)
    after = hour.run(path, 60)["entries"]
    assert all(entry["status"] == "measured" for entry in after.values())
    assert all(after[name] == before[name] for name in ROW_NAMES[:2])


def test_a_run_ends_with_its_time_and_traces_only_what_fits(some, tmp_path, monkeypatch, capsys):
    """Two launches fit into a minute. What hangs until the time is up is not called hung."""
    monkeypatch.undo()  # the whole plan
    monkeypatch.setattr(hour, "Workers", played.Workers)
    clock, waited = [0.0], []

    def ask(self, role, do, given, limit):
        if role == "simulator":
            return {"kernels": [], "us": 1.0, "band_us": [1.0, 2.0]}
        waited.append(limit)
        clock[0] += 30 if len(waited) < 2 else limit
        if len(waited) < 2:
            return {"p50": 1.0}
        raise Unanswered("hung", "no answer")

    monkeypatch.setattr(played.Workers, "ask", ask)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    report = hour.run(tmp_path / "report.json", 1)
    assert clock[0] == 60 and waited == [60, 30]
    assert [e["status"] for e in report["entries"].values()] == ["measured", "unfinished"]
    assert not report["graphs"]
    assert "Plan of 1 minutes, the most valuable first: 2 launch (1 min)" in capsys.readouterr().err


def test_without_the_simulator_s_packages_no_hour_is_spent(some, tmp_path, monkeypatch, capsys):
    path = tmp_path / "report.json"
    missing = Unanswered("refused", "ModuleNotFoundError: No module named 'ml_dtypes'")
    monkeypatch.setattr(played.Workers, "ask", mock.Mock(side_effect=missing))
    with pytest.raises(UserError, match="Estimates need what the simulator has not found"):
        hour.run(path, 60)
    assert "No module named 'ml_dtypes'" in capsys.readouterr().err and not path.exists()


def test_a_second_run_in_the_folder_is_refused_and_the_first_one_keeps_its_report(some, tmp_path):
    path = tmp_path / "report.json"
    with (
        locked_folder(tmp_path, lambda: None),
        pytest.raises(UserError, match="Another run measures in .*, expected none"),
    ):
        hour.run(path, 60)
    assert not path.exists()


@pytest.mark.parametrize("refused", ["--output-format", "--json-output"])  # up to 2.33, from 2.34
def test_of_neuron_s_tools_versions_and_cores_are_kept_and_nothing_that_names_somebody(
    refused, tmp_path, monkeypatch
):
    """Neuron's tools name processes, and newer ones the instance."""
    told = {
        "neuron-ls": '{"instance_id": "i-0aa", "neuron_devices": [{"nc_count": 2, "memory_size": 1,'
        ' "neuron_processes": [{"pid": 7, "command": "/home/me/venv/bin/python"}]}]}',
        "dpkg-query": "aws-neuronx-dkms 2.26.5.0\naws-neuronx-tools 2.28.23.0",
    }
    for name, text in told.items():
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n[ \"$1\" = {refused} ] || echo '{text}'\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = results.machine()
    assert found["chips"] == "1 of 2 cores"
    assert found["packages"]["aws-neuronx-dkms"] == "2.26.5.0"
    assert "i-0aa" not in str(found) and "me" not in str(found["chips"])


def test_another_machine_s_report_is_not_gone_on_with(some, tmp_path):
    path = tmp_path / "report.json"
    report = results.begun(path)
    report["machine"]["instance"] = "trn1.2xlarge"
    results.write(path, report)
    with pytest.raises(UserError, match="another machine or of other versions"):
        results.begun(path)
    with pytest.raises(UserError, match="is where the page goes"):
        results.begun(tmp_path / "report.md")
    path.write_text(json.dumps({"format": 1}))
    with pytest.raises(UserError, match="no report of lab.device_report"):
        results.read(path)
