"""nki.benchmark and nki.profile: documented result objects, marked as estimated."""

import json

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError
from neuron_cpu.core.device import spec
from neuron_cpu.core.time.schedule import schedule


def double(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, value=nl.multiply(nl.load(x), 2.0))
    return out


X = np.ones((128, 64), np.float32)


def test_every_percentile_is_the_estimate(capsys):
    timed = nki.benchmark(warmup=1, iters=2)(double)
    assert timed(X) is None
    latency = timed.benchmark_result.nc_latency
    expected = (schedule(nki.jit(double).trace(X)).total + spec.GRAPH_START_NS) / 1e3
    assert [latency.get_latency_percentile(p) for p in (0, 50, 99, 100)] == [expected] * 4
    assert latency.estimated and timed.benchmark_result.estimated
    assert "estimated, not measured" in capsys.readouterr().err


def test_benchmark_of_a_decorated_kernel_as_the_samples_write_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    timed = nki.benchmark(nki.jit(double), save_neff_name="file.neff", save_trace_name="p.ntff")
    timed(X)
    assert json.loads((tmp_path / "p.ntff").read_text())["otherData"]["estimated"] is True


def test_benchmark_mode_of_jit():
    timed = nki.jit(double, mode="benchmark")
    timed(X)
    assert timed.benchmark_result.profile.metrics["hbm_read_bytes"] == X.nbytes


def test_grids_pass_through():
    @nki.benchmark
    def tiles(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        rows = nl.ds(nl.program_id(0) * 64, 64)
        nl.store(out[rows, :], value=nl.load(x[rows, :]))
        return out

    launched = tiles[2]
    launched(X)
    assert launched.benchmark_result.profile.metrics["instruction_count"] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iters": 0}, "iters >= 1.*sim_benchmark_iterations"),
        ({"warmup": -1}, "sim_benchmark_iterations"),
        ({"save_trace_name": "a.ntff"}, "expected 'file.neff'.*sim_benchmark_neff_name"),
        ({"dma_profile": "warp"}, "'warp' does not exist.*sim_dma_profile"),
    ],
)
def test_benchmark_refuses_bad_options(options, message):
    with pytest.raises(NkiError, match=message):
        nki.benchmark(double, **options)


def test_percentile_outside_of_the_documented_ones_is_refused():
    timed = nki.benchmark(double)
    timed(X)
    with pytest.raises(NkiError, match="latency percentile 95.*sim_percentile"):
        timed.benchmark_result.nc_latency.get_latency_percentile(95)


def test_profile_writes_a_trace_and_replaces_it_only_when_told(tmp_path):
    tmp_path /= "profiles/today"  # made on the way
    nki.profile(working_directory=str(tmp_path))(double)(X)
    assert json.loads((tmp_path / "profile.ntff.json").read_text())["traceEvents"]
    with pytest.raises(NkiError, match="would replace .*pass overwrite=True.*sim_profile_exists"):
        nki.profile(double, working_directory=str(tmp_path))
    nki.profile(double, working_directory=str(tmp_path), overwrite=True)(X)


@pytest.mark.parametrize("folder", [None, "relative/folder"])
def test_profile_needs_an_absolute_folder(folder):
    with pytest.raises(NkiError, match="expected an absolute path.*sim_profile_directory"):
        nki.profile(double, working_directory=folder)
