"""The page's program, and names that programs import beside PyTorch's."""

import re
from pathlib import Path
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl
import nki.simulator
import numpy as np
import pytest
import torch

from neuron_cpu.torch_device.report import Pricer, Recorder, figures
from neuron_cpu.torch_device.state import STATE

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.full
def test_the_talks_program_is_right_and_its_kernel_is_used(capsys, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(STATE, "observer", recorder.operator)
    monkeypatch.setattr(STATE, "regions", recorder.region)
    monkeypatch.setattr(STATE, "before_kernel", recorder.before_kernel)
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.syspath_prepend(DOCS)
    page = (DOCS / "torch_device.md").read_text(encoding="utf-8")
    exec(page.partition("```python\n")[2].partition("```")[0], {"__name__": "__main__"})
    said = capsys.readouterr().out
    cosines = [float(found) for found in re.findall(r"cosine ([0-9.]+)", said)]
    errors = [float(found) for found in re.findall(r"MSE ([0-9.e-]+)", said)]
    assert len(cosines) == 2 and min(cosines) > 0.999
    assert errors[1] < 1.2 * errors[0]
    parts = [part for part in figures(recorder, Pricer())["parts"] if part["compiled"]]
    heads, tokens, width, layers, calls = 2 * 4, 128, 64, 2, 2
    assert [part["nki_macs"] for part in parts] == [
        0,
        2 * heads * tokens * tokens * width * layers * calls,
    ]
    assert parts[0]["macs"] == parts[1]["macs"]


@nki.jit
def plus_one(x: Any) -> Any:
    tile_sb = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile_sb, src=x)
    nisa.tensor_scalar(dst=tile_sb, data=tile_sb, op0=nl.add, operand0=1.0)
    y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=y, src=tile_sb)
    return y


def test_names_of_lite_and_of_older_builds_mean_the_same(monkeypatch):
    import torch_neuronx
    from libtorch_neuronx_lite._compiler.nki_op import nki_op
    from libtorch_neuronx_lite.compile.platform import get_platform_target
    from libtorch_neuronx_lite.nki.nki_hop import wrap_nki
    from torch_neuronx import nki_hop

    assert nki_op is nki_hop.nki_op is torch_neuronx.nki_op
    assert get_platform_target() == "trn3"
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert get_platform_target() == "trn2"
    x = torch.zeros(2, 3, device="neuron")
    for backend in ("neuron_libtorch", "neuron_native_lite"):
        torch._dynamo.reset()
        got = torch.compile(lambda v: wrap_nki(plus_one)(v), backend=backend, fullgraph=True)(x)
        assert got.sum() == 6


def test_the_simulators_own_call_takes_arrays():
    got = nki.simulator.simulate_kernel(plus_one.func, (), {"x": np.zeros((2, 3), np.float32)}, 1)
    assert isinstance(got, np.ndarray) and (got == 1).all()


def test_a_profile_is_pytorchs_trace(tmp_path):
    from torch_neuronx.profiling import NeuronConfig, NeuronProfiler, ProfileMode

    config = NeuronConfig(modes=[ProfileMode.DEVICE], profile_output_dir=tmp_path / "out")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        experimental_config=config,
        on_trace_ready=NeuronProfiler(config).export_trace,
    ):
        torch.ones(2, device="neuron") + 1
    assert "aten::add" in (tmp_path / "out" / "trace.json").read_text()
