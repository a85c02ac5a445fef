"""The report of a program on the device, against figures that are counted here by hand."""

import json
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl
import pytest
import torch
from torch import nn

from neuron_cpu.core.report import report as profiles
from neuron_cpu.core.time import cost
from neuron_cpu.core.time.schedule import schedule
from neuron_cpu.errors import UsageError
from neuron_cpu.sandbox import run_script
from neuron_cpu.torch_device.report import recorded


@nki.jit
def product(left: Any, right: Any) -> Any:
    """left.T @ right of [128, 128] and [128, N]: rounded to bfloat16 on the way out."""
    left_sb, right_sb = (nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf) for x in (left, right))
    nisa.dma_copy(dst=left_sb, src=left)
    nisa.dma_copy(dst=right_sb, src=right)
    made_psum = nl.ndarray(right.shape, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=made_psum, stationary=left_sb, moving=right_sb)
    made_sb = nl.ndarray(right.shape, dtype=right.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=made_sb, src=made_psum)
    made = nl.ndarray(right.shape, dtype=right.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=made, src=made_sb)
    return made


def transposed_product(left, right):
    assert left.dtype is right.dtype is torch.float32
    return left.T @ right


def program():
    torch.manual_seed(0)
    left, right = (torch.randn(128, 128).bfloat16().to("neuron") for _ in range(2))
    layer = nn.Linear(128, 64, bias=False).bfloat16().to("neuron")
    torch._dynamo.reset()
    run = torch.compile(
        lambda a, b: layer(product(a, b)), backend="neuron", options={"model_name": "block"}
    )
    with torch.no_grad():
        for _ in range(3):
            run(left, right) + 1
        torch.linalg.qr(left.float())


def test_a_report_says_what_ran_where_and_how_exactly(tmp_path):
    figures, page = tmp_path / "run.json", tmp_path / "run.html"
    with recorded([str(figures), str(page)], [f"product={__name__}:transposed_product"]):
        program()
    found = json.loads(figures.read_text())
    block = next(part for part in found["parts"] if part["name"] == "block")
    own, others = 128**3, 128 * 128 * 64
    assert block["compiled"] and block["calls"] == 3
    assert (block["nki_macs"], block["macs"]) == (3 * own, 3 * (own + others))
    kernel = next(row for row in block["operators"] if row["kind"] == "kernel")
    example = [torch.empty(128, 128, dtype=torch.bfloat16, device="meta")] * 2
    alone = profiles.profile(schedule(product.trace(*example)))
    overheads = cost.Overheads()
    assert kernel["time_ns"] == pytest.approx(3 * (alone.time_ns + overheads.kernel_ns))
    rest = sum(row["time_ns"] for row in block["operators"])
    assert block["time_ns"] == pytest.approx(rest + 3 * overheads.graph_ns)
    assert block["band_ns"][0] < block["time_ns"] < block["band_ns"][1]
    assert block["bound"] == "launches"
    between = next(part for part in found["parts"] if part["name"] == "eager, after block")
    assert between["calls"] == 3 and not between["compiled"]
    assert {row["name"]: row["calls"] for row in between["operators"]}["add"] == 3
    assert found["fallbacks"] == ["aten::linalg_qr"]
    text = page.read_text()
    assert "eager, after block" in text and "Left to the CPU: aten::linalg_qr" in text


def test_kernels_are_compared_with_fp32(tmp_path):
    figures = tmp_path / "run.json"
    with recorded([str(figures)], [f"product={__name__}:transposed_product"]):
        program()
    one, other = json.loads(figures.read_text())["kernels"]
    assert one["against"] == "its own instructions in fp32"
    assert other["against"] == "transposed_product in fp32"
    torch.manual_seed(0)
    left, right = (torch.randn(128, 128).bfloat16().float() for _ in range(2))
    exact = left.T @ right
    apart = exact - exact.bfloat16().float()
    for line in (one, other):
        assert line["largest"] == pytest.approx(float(apart.abs().max()), rel=0.3)
        assert line["relative"] == pytest.approx(float(apart.norm() / exact.norm()), rel=0.1)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--report"], "--report has no value"),
        (["--without", "a=b:c", "script.py"], "--without without a report"),
        (["--report", "nowhere/at/all.html", "script.py"], "in no folder that exists"),
        (["--report", "page.html"], "names no script"),
        (["--report", "page.html", "--without", "a=b", "script.py"], "names no function"),
    ],
)
def test_options_are_refused_in_a_sentence(arguments, said, monkeypatch):
    monkeypatch.setattr(run_script, "install", lambda: "")
    monkeypatch.setattr(run_script, "_forget_launcher", lambda: None)
    monkeypatch.setattr("sys.meta_path", [*__import__("sys").meta_path])
    with pytest.raises(UsageError, match=said):
        run_script.run(arguments)
