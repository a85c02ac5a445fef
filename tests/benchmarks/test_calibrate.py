"""The calibration: its kernels compute what they claim, its table says what it predicts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def load(name):
    """A module of benchmarks/, which is no package."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


kernels = load("calibration_kernels")
calibrate = load("calibrate")
rows = load("calibration_rows")


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", ["matmul_tiled", "matmul_hoisted", "matmul_blocked_2x2"])
def test_matmuls(name):
    lhs, rhs = random(256, 256, dtype=torch.bfloat16), random(256, 1024, dtype=torch.bfloat16)
    expected = lhs.double().T @ rhs.double()
    torch.testing.assert_close(
        getattr(kernels, name)(lhs, rhs).double(), expected, rtol=2**-8, atol=2**-6
    )


def test_fully_blocked_matmul():
    lhs, rhs = random(2048, 2048, dtype=torch.bfloat16), random(2048, 1024, dtype=torch.bfloat16)
    expected = lhs.double().T @ rhs.double()
    error = (kernels.matmul_blocked_3d(lhs, rhs).double() - expected).abs().max()
    assert error < 0.01 * expected.abs().max()  # two bf16 roundings: sums of blocks stay in bf16


def selective_scan(delta, u, a, b, c):
    """The recurrence itself, in float64."""
    delta, u, a, b, c = (t.double() for t in (delta, u, a, b, c))
    out = torch.zeros_like(delta)
    state = torch.zeros(delta.shape[0], a.shape[1], dtype=torch.float64)
    for t in range(delta.shape[1]):
        decay = torch.exp(delta[:, t, None] * a)
        state = decay * state + (delta[:, t] * u[:, t])[:, None] * b[None, :, t]
        out[:, t] = (state * c[None, :, t]).sum(-1)
    return out


@pytest.mark.parametrize(
    ("name", "channels", "length"),
    [("mamba_states_outside", 256, 96), ("mamba_channels_outside", 128, 512),
     ("mamba_channels_outside", 128, 1024), ("mamba_tiled", 128, 1024)],
)  # fmt: skip
def test_selective_scans(name, channels, length):
    delta, u = random(channels, length, seed=1).abs(), random(channels, length, seed=2)
    a, b, c = -random(channels, 3, seed=3).abs(), random(3, length, seed=4), random(3, length)
    found = getattr(kernels, name)(delta, u, a, b, c)
    expected = selective_scan(delta, u, a, b, c)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["layernorm_language", "layernorm_statistics"])
def test_layernorms(name):
    x = 3 * random(300, 1000) + 1
    gamma, beta = random(1, 1000, seed=1), random(1, 1000, seed=2)
    expected = torch.nn.functional.layer_norm(x, (1000,), gamma[0], beta[0], 1e-5)
    torch.testing.assert_close(getattr(kernels, name)(x, gamma, beta), expected)


# --- rewritten kernels beside their originals -----------------------------------------------------
def point(name):
    return next(p for p in calibrate.POINTS if p.name == name)


def test_every_point_stands_in_the_document():
    document = calibrate.DOCUMENT.read_text()
    for one in calibrate.POINTS:
        assert f"| {one.name} | {one.measured_us:.1f} |" in document


def test_the_original_s_ratio_stands_beside_a_rewritten_kernel(monkeypatch):
    one = point("Mamba v1, 256 ch, 512 tokens")
    found = calibrate.predict(one)
    monkeypatch.setattr(calibrate.bands, "ratios", lambda: {one.original: 1.234})
    mine = calibrate.ratio(one, found)
    assert f"| {mine:.2f} | 1.23 |" in calibrate.rewritten_table([(one, found)])
    monkeypatch.setattr(calibrate.bands, "ratios", lambda: {})
    assert f"| {mine:.2f} |  |" in calibrate.rewritten_table([(one, found)])


def test_originals_are_rows_of_the_data():
    known = {row.id for row in rows.rows()}
    for one in calibrate.POINTS:
        assert one.original in known or (not one.original and not one.device)


def test_kernel_that_spills_is_named_as_refused():
    one = point("Mamba v2, 4096 ch, 8192 tokens")
    assert calibrate.cells(one, None).startswith("refused")


def test_points_can_be_chosen_and_a_miss_fails_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["calibrate.py", "--rows", "256 ch"])
    monkeypatch.setattr(calibrate, "LIMIT", 100.0)
    assert calibrate.main() == 0
    assert capsys.readouterr().out.count("Mamba v1") == 1
    monkeypatch.setattr(calibrate, "LIMIT", -1.0)
    assert calibrate.main() == 1
    assert "off by more than" in capsys.readouterr().out


# --- the data -------------------------------------------------------------------------------------
def test_data_is_complete_and_names_are_unique():
    found = rows.rows()
    assert len({row.id for row in found}) == len(found) > 60
    for row in found:
        assert row.half in rows.HALVES and row.sdk and row.kind and row.figures and row.machine
        assert len(row.commit) == 40 and int(row.commit, 16)
        assert row.measured_us > 0 and row.arguments
        assert row.bound in ("", *rows.CLASSES)
        assert any(isinstance(rows.tensor(a), torch.Tensor) for a in row.arguments)
        assert (row.extract == "trace") == bool(row.imports)


def test_halves_share_no_source():
    halves = {}
    for row in rows.rows():
        halves.setdefault((row.repository, row.file), set()).add(row.half)
    assert all(len(found) == 1 for found in halves.values())


# --- running rows from a folder -------------------------------------------------------------------
KERNEL = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import {neighbour}

WIDTH = 7

@nki.jit
def twice(x, times=2):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out[0:128, 0:WIDTH], value=nl.multiply(nl.load(x[0:128, 0:WIDTH]), times))
    return out
"""


def row(**changes):
    values = {
        "id": "one", "source": "s", "repository": "own/er", "commit": "0123456" + "7" * 33,
        "file": "kernels/k.py", "function": "twice", "measured_us": 20.0, "kind": "p99",
        "sdk": "2.21", "half": "fit", "group": "s", "figures": "here", "machine": "none",
        "arguments": ("128x7:fp32",), "keywords": {"times": 3},
    }  # fmt: skip
    return rows.Row(**{**values, **changes})


def checkout(folder, text=None, name="own/er@0123456", neighbour="helper_of_this_test"):
    (folder / name / "kernels").mkdir(parents=True)
    text = KERNEL.format(neighbour=neighbour) if text is None else text
    (folder / name / "kernels" / "k.py").write_text(text)
    (folder / name / "kernels" / f"{neighbour}.py").write_text("")


@pytest.mark.parametrize("name", ["own/er@0123456", "own/er"])
def test_a_row_runs_its_file_with_the_file_s_own_imports(tmp_path, name):
    checkout(tmp_path, name=name)
    outcome = calibrate.run(row(), tmp_path)
    assert outcome.problem == "" and outcome.instructions == 3
    assert outcome.ratio == pytest.approx(outcome.estimated_us / 20.0)
    assert "helper_of_this_test" not in sys.modules  # another checkout may have its own


@pytest.mark.warns("sim_output_partly_written")
def test_a_repair_replaces_one_place(tmp_path):
    checkout(tmp_path)
    kernel = rows.kernel(row(repairs=(("WIDTH = 7", "WIDTH = 5"),)), tmp_path)
    assert kernel(torch.ones(128, 7))[0, :5].tolist() == [2.0] * 5
    with pytest.raises(ValueError, match="0 times 'WIDTH = 8'"):
        rows.kernel(row(repairs=(("WIDTH = 8", "WIDTH = 5"),)), tmp_path)


def test_rows_that_cannot_run_say_why(tmp_path):
    missing = calibrate.run(row(), tmp_path)
    assert missing.missing and "own/er@0123456/kernels/k.py is not there" in missing.problem
    checkout(tmp_path)
    refused = calibrate.run(row(arguments=("256x7:fp32",), keywords={"times": None}), tmp_path)
    assert refused.ratio is None and refused.problem == "refused at k.py:11: sim_operand_type"
    failed = calibrate.run(row(function="thrice"), tmp_path)
    assert failed.problem.startswith("failed: AttributeError")
    text = calibrate.public_table([missing, refused, failed])
    assert text.count("\n") == 4 and "is not there" in text


TRACE = """CodeCandidate(parent=CodeCandidate(parent=None,
plan=None,
code='''first''',
score=nan),
plan='''then''',
code='''second''',
score=0.5)
"""


def test_steps_of_a_trace_come_in_order_and_nothing_else_is_evaluated():
    found = rows.steps(TRACE)
    assert [step.fields["code"] for step in found] == ["first", "second"]
    assert found[1].fields["score"] == 0.5
    assert rows.step_of(TRACE, row(extract="trace", step=1, imports=("import a",))) == (
        "import a\nsecond"
    )
    with pytest.raises(ValueError, match="expected CodeCandidate"):
        rows.steps("CodeCandidate(parent=None, code=print(1))")
    with pytest.raises(ValueError):
        rows.steps("CodeCandidate(parent=None, code=__import__)")


# --- figures --------------------------------------------------------------------------------------
def outcome(name, measured, estimated, **changes):
    return calibrate.Outcome(row(id=name, measured_us=measured, **changes), estimated, "DMA")


def test_pairs_closer_than_five_percent_have_no_order():
    found = [outcome("a", 100, 120), outcome("b", 104, 100), outcome("c", 130, 112),
             outcome("d", 500, 1, group="other")]  # fmt: skip
    names = {(fast.row.id, slow.row.id) for fast, slow in calibrate.pairs(found)}
    assert names == {("a", "c"), ("b", "c")}
    cells = [cell.strip() for cell in calibrate.summary(found).split("|")]
    # ratios 1.2, 0.96, 0.86 and 0.002: half within 15 %, three quarters within 25 %
    assert cells[:7] == ["4", "4", "50%", "75%", "0.91", "1", "1 of 2"]
    assert "c before a" in calibrate.named_outliers(found)


def test_bands_hold_percentiles_by_class_and_every_ratio():
    found = [outcome(f"r{k}", 100, 80 + 5 * k) for k in range(11)]
    data = calibrate.band_data([*found, calibrate.Outcome(row(id="x"), problem="refused: no")])
    assert data["rows"] == 11 and data["ratios"]["r4"] == 1.0 and "x" not in data["ratios"]
    # eleven ratios 0.80, 0.85, ... 1.30: the 10th percentile is the second, the 90th the tenth
    assert data["bands"]["DMA"] == {"rows": 11, "low": 0.85, "median": 1.05, "high": 1.25}
    assert data["bands"]["all"] == data["bands"]["DMA"] and "VectorE" not in data["bands"]


# --- what the project ships -----------------------------------------------------------------------
def test_shipped_bands_and_table_agree():
    bands = calibrate.bands
    shipped = bands.load()
    assert {"all"} <= set(shipped) <= {"all", *bands.CLASSES}
    for band in shipped.values():
        assert 0 < band.low <= band.median <= band.high and band.rows > 1
    assert shipped["all"].rows == len(bands.ratios())
    known = {r.id: r for r in rows.rows()}
    document = calibrate.DOCUMENT.read_text()
    for name, value in bands.ratios().items():
        line = next(x for x in document.splitlines() if x.startswith(f"| {name} |"))
        cells = [cell.strip() for cell in line.split("|")]
        assert float(cells[3]) == known[name].measured_us
        assert abs(float(cells[6]) - value) <= 0.006, "run make calibrate PUBLIC=DIR"


def test_a_band_turns_an_estimate_into_measured_times():
    band = calibrate.bands.Band("DMA", 9, 0.8, 1.0, 1.25)
    assert band.measured(100.0) == (80.0, 125.0)


def test_class_of_a_critical_path():
    kind = calibrate.bands.kind_of
    assert kind({"TensorE": 5.0, "DMA": 3.0}) == "TensorE"
    assert kind({"result latency": 5.0, "DMA": 3.0}) == "latency"
    assert kind({"GpSimdE": 5.0}) == "all"
    assert kind({}) == "latency"
    assert calibrate.bands.of({"GpSimdE": 5.0}).kind == "all"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--rows", "nothing"], "no row has nothing"),
     (["--public", ".", "--rows", "nothing"], "no row has nothing"),
     (["--public", "nowhere"], "is no folder"),
     (["--rows", "matmul", "--write"], "needs all rows")],
)  # fmt: skip
def test_wrong_rows_write_nothing(arguments, said, monkeypatch, capsys):
    before = calibrate.DOCUMENT.read_bytes()
    monkeypatch.setattr(sys, "argv", ["calibrate.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        calibrate.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert calibrate.DOCUMENT.read_bytes() == before


def test_rows_that_are_not_run_are_read_from_the_page():
    for row in rows.rows():
        found = calibrate.on_page(row)
        assert found.estimated_us > 0 and found.kind in rows.CLASSES and found.busy.endswith("%")
