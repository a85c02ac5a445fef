"""Reports on schedules: figures, words, tables, traces, and the profile command."""

import json
import re

import pytest
import torch
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

from neuron_cpu.__main__ import main
from neuron_cpu.core import Kernel
from neuron_cpu.core.device.spec import GEN2
from neuron_cpu.core.report import bands, report
from neuron_cpu.core.time.schedule import DMA, ENGINES, schedule

BF16, F32 = torch.bfloat16, torch.float32
LINE = re.compile(r"test_report\.py:\d+")


def product(a, b):
    """a [256, 128], b [256, 512] -> a.T b [128, 512], and the transpose of a's first tile."""
    out = nl.ndarray((128, 512), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    turned = nl.ndarray((128, 128), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    total = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)
    for k in nl.affine_range(2):
        left = nl.load(a[nl.ds(128 * k, 128), :])
        total[...] += nisa.nc_matmul(left, nl.load(b[nl.ds(128 * k, 128), :]))
    bank = nl.ndarray((128, 128), dtype=nl.bfloat16, buffer=nl.psum)
    bank[...] = nisa.nc_transpose(nl.load(a[0:128, :]))
    nl.store(turned, value=nisa.tensor_copy(bank))
    nl.store(out, value=nisa.tensor_copy(total, dtype=nl.bfloat16))
    return out, turned


def hbm(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture(scope="module")
def found():
    return schedule(Kernel(product).trace(hbm(256, 128), hbm(256, 512)))


@pytest.fixture(scope="module")
def summary(found):
    return report.profile(found)


# --- figures --------------------------------------------------------------------------------------
def test_lines_add_up_to_the_whole(found, summary):
    busy = found.engine_busy()
    for key, engine in list(zip(report.ENGINE_KEYS, ENGINES))[:DMA]:
        assert sum(line.busy[key] for line in summary.lines) == pytest.approx(busy[engine])
    assert sum(line.busy["dma"] for line in summary.lines) == pytest.approx(
        sum(found.lane_busy) / GEN2.dma.engines
    )
    assert sum(line.dma_bytes for line in summary.lines) == summary.metrics["dma_transfer_bytes"]
    for name in (
        "hbm_read_bytes",
        "hbm_write_bytes",
        "mfu_estimated_percent",
        "mbu_estimated_percent",
    ):
        whole = summary.metrics[name]
        assert sum(getattr(line, name) for line in summary.lines) == pytest.approx(whole)
    assert sum(line.instructions for line in summary.lines) == len(found.program)
    assert sum(line.critical for line in summary.lines) == pytest.approx(found.total)
    assert sum(summary.critical.values()) == pytest.approx(found.total)


# --- tables, trace --------------------------------------------------------------------------------
def test_a_kernel_is_of_the_class_of_its_largest_resource():
    assert bands.kind_of({"VectorE": 1.0, "DMA": 2.0}) == "DMA"


def test_trace_is_what_perfetto_opens(found):
    trace = json.loads(json.dumps(report.perfetto("product", found)))
    events = trace["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows[0] == "TensorE" and rows[DMA + 15] == "DMA queue 15"
    slices = [e for e in events if e["ph"] == "X"]
    assert all(e["ts"] >= 0 and e["dur"] > 0 and e["tid"] in rows for e in slices)
    assert all(LINE.match(e["args"]["source"]) and e["args"]["results"] for e in slices)
    for row in rows:
        mine = sorted((e["ts"], e["dur"]) for e in slices if e["tid"] == row)
        for (begin, time), (after, _) in zip(mine, mine[1:]):
            assert begin + time <= after + 1e-3
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"SBUF bytes per partition", "PSUM banks", "DMA GB/s"}


@pytest.mark.parametrize("chip", ["trn1", "trn2", "trn3"])
def test_the_area_under_the_dma_curve_is_what_moves(chip, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", chip)
    found = schedule(Kernel(product).trace(hbm(256, 128), hbm(256, 512)))
    area = sum(rate for _, rate in report.throughput(found, 50)) * found.total / 50
    assert area == pytest.approx(report.profile(found).metrics["dma_transfer_bytes"])


# --- command --------------------------------------------------------------------------------------
KERNEL_FILE = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

@nki.jit
def scale(x, factor=1.0):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, value=nl.multiply(nl.load(x), factor))
    return out
"""


@pytest.fixture
def kernel_file(tmp_path):
    path = tmp_path / "profiled_kernel.py"
    path.write_text(KERNEL_FILE)
    return path


def test_command_profiles_a_kernel_of_a_file(kernel_file, tmp_path, capsys):
    figures, trace = tmp_path / "out.json", tmp_path / "out.trace.json"
    status = main(
        [
            "profile",
            f"{kernel_file}:scale",
            "--arg",
            "128x512:bf16",
            "--arg",
            "factor=2.0",
            "--dma-profile",
            "row-rule",
            "--json",
            str(figures),
            "--trace",
            str(trace),
        ]
    )
    assert status == 0
    assert "bound by " in capsys.readouterr().out
    content = json.loads(figures.read_text())
    assert content["name"] == "scale" and content["metrics"]["hbm_read_bytes"] == 128 * 1024
    assert json.loads(trace.read_text())["otherData"]["dma_profile"] == "row-rule"


@pytest.mark.parametrize(("columns", "shown"), [(128, True), (4096, False)])
def test_command_shows_both_releases_where_they_differ(tmp_path, capsys, columns, shown):
    path, figures = tmp_path / "moving.py", tmp_path / "figures.json"
    body = "nl.store(out, value=nl.multiply(nl.load(x), factor))"
    loop = "for k in nl.affine_range(32):\n        " + body.replace("out,", "out[k],")
    path.write_text(KERNEL_FILE.replace(body, loop.replace("(x)", "(x[k])")))
    shape = f"32x128x{columns}:bf16"
    assert main(["profile", f"{path}:scale", "--arg", shape, "--json", str(figures)]) == 0
    times = json.loads(figures.read_text())["time_ns_by_release"]
    assert times["sdk2.25"] == json.loads(figures.read_text())["time_ns"]
    assert (times["sdk2.21"] > 1.1 * times["sdk2.25"]) is shown
    assert ("with sdk2.21: " in capsys.readouterr().out) is shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{file}:scale", "--arg", "128x4:bf16", "--dma-profile", "warp"], "'warp' does not exist"),
        (["{file}::missing", "--arg", "128x4:bf16"], "has no kernel 'missing', expected a"),
        (["{file}"], "expected FILE:KERNEL"),
        (["numpy:exp"], "write one that calls numpy.exp."),
        (["nowhere.py:scale"], "file nowhere.py does not exist"),
        (["{file}:scale"], "missing a required argument: 'x'), expected scale(x, factor=1.0)"),
        (["{file}:scale", "--arg", "129x4:bf16"], "129"),
        (["{file}:scale", "--arg", "128x4:b16"], "names dtype 'b16'"),
        (["{file}:scale", "--arg", "128by4"], "neither a tensor nor a Python literal"),
        (["{file}:scale", "--arg", "128x4:bf16", "--grid", "0x2"], "--grid 0x2"),
        (
            ["{file}:scale", "--arg", "128x4:bf16", "--schedule", "random"],
            "'random' does not exist",
        ),
    ],
)
def test_command_refuses_bad_input_in_one_sentence(kernel_file, capsys, arguments, message):
    assert main(["profile", *(a.format(file=kernel_file) for a in arguments)]) == 2
    _, error, *lesson = capsys.readouterr().err.strip().split("\n")  # behind the SDK's line
    assert message in error
    assert len(lesson) <= 1 and all(line.startswith("Lesson ") for line in lesson)


def test_command_shows_what_the_written_order_costs(tmp_path, capsys):
    path = tmp_path / "chains.py"
    path.write_text(
        KERNEL_FILE.replace(
            "nl.store(out, value=nl.multiply(nl.load(x), factor))",
            "tile = nl.load(x)\n"
            "    for k in nl.affine_range(4):\n"
            "        power = nl.exp(nl.multiply(tile, factor))\n"
            "        nl.store(out[nl.ds(32 * k, 32)], value=nl.multiply(power[0:32], factor))",
        )
    )
    times = {}
    for order in ("compiler", "program-order"):
        figures = tmp_path / "figures.json"
        command = ["profile", f"{path}:scale", "--arg", "128x512:bf16", "--schedule", order]
        assert main([*command, "--json", str(figures)]) == 0
        assert f"schedule {order})" in " ".join(capsys.readouterr().out.split())
        content = json.loads(figures.read_text())
        assert content["schedule_order"] == order
        times[order] = content["time_ns"]
    assert times["compiler"] < times["program-order"]


def test_command_says_where_a_kernel_file_fails_to_import(tmp_path, capsys):
    path = tmp_path / "broken_kernel.py"
    path.write_text("import no_such_module_at_all\n")
    assert main(["profile", f"{path}:k"]) == 2
    assert "cannot be imported (ModuleNotFoundError" in capsys.readouterr().err
