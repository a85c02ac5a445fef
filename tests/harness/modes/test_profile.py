"""--mode profile: estimates from shapes alone, their sums, their options, and neuron-profile."""

import json
import os
import types

import pytest
import torch

import main
from harness import sdk
from harness.errors import UserError
from harness.figures import estimate
from harness.inputs import command_line
from harness.modes import profile
from harness.processes.worker import Host, Job
from harness.processes.workers import SubmissionFailed
from harness.session.model import construct
from harness.settings import PROFILE_FILES
from harness.simulator import cost
from neuron_cpu.runtime.recording import TORCH, Event, TensorShape
from tests.tiny_model import TINY_CONFIG


@pytest.fixture(scope="module")
def shapes_folder(tmp_path_factory):
    """A model folder with nothing but a config.json."""
    folder = tmp_path_factory.mktemp("shapes")
    config = TINY_CONFIG | {"max_position_embeddings": 16384, "num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(folder, output, *arguments):
    """The driver's profile of a folder as JSON."""
    status = main.main(
        [
            "--mode",
            "profile",
            "--enable-nki",
            "--model-path",
            str(folder),
            "--profile-output",
            str(output),
            *arguments,
        ]
    )
    assert status == 0
    return json.loads((output / "profile.json").read_text())


def estimates(folder, *arguments):
    """The same graphs as objects, without any output."""
    asked = command_line.parse(
        ["--mode", "profile", "--enable-nki", "--model-path", str(folder), *arguments]
    )
    session = profile.shapes_only_session(asked, folder)
    settings = session.settings
    job = Job(settings, folder, 0, None, session.source, folder, None, False)
    host = Host(job, print)
    construct(host, "nki")
    name = settings.dma_profile or "sdk2.25"
    return estimate.graphs(host, "nki", name).graphs


@pytest.fixture(scope="module")
def profiled(shapes_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("profile")
    return run(shapes_folder, output, "--seq-len", "256"), output


def test_prefill_and_decode_of_a_model_without_weights(profiled):
    content, _ = profiled
    assert content["estimated"] is True
    graphs = {g["submodel"]: g for g in content["graphs"]}
    assert set(graphs) == {"context_encoding_model", "token_generation_model", "speculation_model"}
    assert all(g["bucket"] == 256 and g["latency_ns"] > 0 for g in graphs.values())


def launch_ns(graph):
    """Launch and host; half a row of logits fp32 for each token, as llama.py's leave in bf16."""
    costs, rows = cost.Overheads(), 4 if graph["submodel"] == "speculation_model" else 0.5
    return costs.step_ns() + (rows - 1) * costs.logits_ns


def test_latency_is_the_sum_of_the_operators_and_the_launch(profiled):
    for graph in profiled[0]["graphs"]:
        total = sum(op["count"] * op["time_ns"] for op in graph["operators"])
        assert graph["latency_ns"] == pytest.approx(total + launch_ns(graph))
        assert graph["figures"]["total_time"] == graph["latency_ns"]


def test_assumed_costs_are_added_as_given(shapes_folder, profiled):
    graphs = estimates(
        shapes_folder,
        *["--seq-len", "256", "--collective-us", "110", "--graph-launch-us", "0"],
        *["--kernel-launch-us", "5", "--host-step-us", "100"],
    )
    for before, after in zip(profiled[0]["graphs"], graphs):
        kernels, collectives = (
            sum(op["count"] for op in before["operators"] if op["kind"] == kind)
            for kind in (estimate.KERNEL, estimate.COLLECTIVE)
        )
        assert collectives >= 6  # two all-reduces in each of three layers
        added = collectives * 84_000 + kernels * 3_000 - 94_000 - 2_030_000 + 100_000
        assert after.latency_ns - before["latency_ns"] == pytest.approx(added)


def test_another_profile(shapes_folder, profiled):
    graphs = estimates(shapes_folder, "--seq-len", "256", "--dma-profile", "hbm-peak")
    for before, after in zip(profiled[0]["graphs"], graphs, strict=True):
        assert after.latency_ns < before["latency_ns"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dma-profile", "warp"], "'warp' does not exist, expected one of sdk2.21"),
        (["--profile-model", "llama-3.2-1b"], "name two models"),
        (["--seq-len", "99999"], "--seq-len must be at most 16384"),
    ],
)
def test_bad_input_is_one_sentence(shapes_folder, capsys, arguments, message):
    status = main.main(["--mode", "profile", "--model-path", str(shapes_folder), *arguments])
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert status == 2 and message in last and last.startswith("main.py: ")


def test_folder_without_a_config_is_refused(tmp_path, capsys):
    assert main.main(["--mode", "profile", "--model-path", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err


# --- parts ----------------------------------------------------------------------------------------


def test_the_graphs_of_a_step_with_a_draft_model_are_priced(shapes_folder, tmp_path):
    sizes = "--no-enable-nki", "--seq-len", "256", "--draft-model-path", str(shapes_folder)
    graphs = [g["submodel"] for g in run(shapes_folder, tmp_path, *sizes)["graphs"]]
    assert "speculation_model" in graphs and graphs[-1] == "draft_token_generation_model"


def test_a_step_ahead_hides_the_host_behind_the_device():
    """Only decode runs ahead, and what the host needs longer than the device stays."""
    moved = TensorShape((10_000_000,), torch.int8)
    event = Event("layers.0", TORCH, "matmul", (moved,), (), macs=1)
    costs = estimate.cost.Overheads(graph_ns=50_000, host_ns=250_000)

    def latency(tag, costs, ahead=True):
        estimator = estimate.Estimator("hbm-peak", costs, 1, runs_ahead=ahead)
        return estimator.graph(tag, 64, 1, [event]).latency_ns

    device = latency(estimate.DECODE, costs, ahead=False) - costs.step_ns()
    assert 0 < device < 300_000
    assert latency(estimate.DECODE, costs) == pytest.approx(300_000)
    assert latency(estimate.PREFILL, costs) == pytest.approx(device + costs.step_ns())
    light = estimate.cost.Overheads(graph_ns=1000, host_ns=2000)
    assert latency(estimate.DECODE, light) == pytest.approx(device)


STEP_US = {"logits": 345, "argmax": 200, "host-step": 2030, "graph-launch": 94}


@pytest.mark.parametrize("name", STEP_US)
def test_each_cost_of_a_step_has_its_own_option(name):
    """In a call of four tokens, each of which sends its logits."""

    def latency(*given):
        costs = estimate.overheads(command_line.parse(["--mode", "profile", *given]))
        return estimate.Estimator("hbm-peak", costs, 1).graph("several", 64, 1, [], 4).latency_ns

    added = latency(f"--{name}-us", "1000") - latency()
    assert added == pytest.approx((4 if name == "logits" else 1) * (1000 - STEP_US[name]) * 1e3)


# --- device ---------------------------------------------------------------------------------------
def test_device_graphs_go_through_neuron_profile(tmp_path, monkeypatch, capsys):
    graph = tmp_path / "graphs" / "tkg" / "graph.neff"
    graph.parent.mkdir(parents=True)
    graph.write_bytes(b"")
    log = tmp_path / "calls"
    tool = tmp_path / "bin" / "neuron-profile"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setattr(sdk, "platform", lambda: sdk.DEVICE)
    monkeypatch.setattr(profile, "open_session", lambda settings: None)
    monkeypatch.setattr(profile, "build", lambda opened: types.SimpleNamespace(folder=tmp_path))
    assert profile.run(types.SimpleNamespace()) == 0
    trace = graph.with_suffix(".ntff")
    assert log.read_text().splitlines() == [
        f"capture -n {graph} -s {trace}",
        f"view -n {graph} -s {trace} --output-format summary-text",
    ]
    assert f"neuron-profile capture -n {graph}" in capsys.readouterr().out


def test_device_folder_without_graphs_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sdk, "platform", lambda: sdk.DEVICE)
    monkeypatch.setattr(profile, "open_session", lambda settings: None)
    monkeypatch.setattr(profile, "build", lambda opened: types.SimpleNamespace(folder=tmp_path))
    with pytest.raises(UserError, match="no .neff files"):
        profile.run(types.SimpleNamespace())


def test_an_unwritable_profile_folder_is_refused_before_the_work(shapes_folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    status = main.main(
        [
            "--mode",
            "profile",
            "--model-path",
            str(shapes_folder),
            "--profile-output",
            str(tmp_path / "file" / "p"),
        ]
    )
    told = capsys.readouterr().err
    assert status == 2 and "file is not a folder" in told and "Tracing" not in told


@pytest.mark.parametrize("odd", ["none", "link", "pipe"])
def test_what_a_process_leaves_for_files_is_plain(odd, tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.write_text("not yours")
    for name in PROFILE_FILES:
        (own / name).write_text(name)
    (own / "trace.json").unlink()
    if odd == "link":
        (own / "trace.json").symlink_to(other)
    elif odd == "pipe":
        os.mkfifo(own / "trace.json")
    with pytest.raises(SubmissionFailed, match="The model cannot be profiled: "):
        profile._copy_files(own, tmp_path / "copies")
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["profile.json"]


@pytest.mark.full
@pytest.mark.parametrize("degree", [8, 32])
@pytest.mark.parametrize("shapes", ["llama-3.1-8b", "llama-3.1-70b"])
def test_large_shapes_at_large_degrees(shapes, degree, run_main):
    """Key/value heads are one a rank at degree 8, and shared by four ranks at 32."""
    arguments = ("--profile-model", shapes, "--tp-degree", degree, "--seq-len", "320")
    done = run_main("--mode", "profile", "--enable-nki", *arguments)
    assert done.returncode == 0, done.stderr
    assert "token_generation_model, bucket 320" in done.stdout


@pytest.mark.libraries
def test_a_prefix_hit_and_a_step_over_blocks_have_prices(shapes_folder):
    """The rest behind a prefix takes less than the whole; no copy of the blocks is gathered."""
    options = ["--seq-len", "1024", "--batch-size", "4", "--is-prefix-caching"]
    whole, rest, step = estimates(shapes_folder, *options)
    assert [found.sizes for found in (whole, rest, step)] == ["992", "128+992", "1024"]
    assert rest.latency_ns < whole.latency_ns and (whole.batch, step.batch) == (1, 4)
    for found in (rest, step):
        kernels = {op.name for op in found.operators if op.kind == estimate.KERNEL}
        assert {name for name in kernels if name.startswith("attention_")} == {
            "attention_chunk_kernel"
        }
        read = [op.bytes for op in found.operators if op.kind == estimate.TORCH]
        assert max(read) < 1 << 20  # a layer's blocks of four sequences are 1 MiB


@pytest.mark.parametrize(
    ("batch", "samples", "rows"), [(1, False, 1), (8, False, 8), (1, True, 0), (8, True, 0)]
)
def test_each_row_pays_for_its_logits_and_none_where_the_device_samples(batch, samples, rows):
    """345 us a row (a test of NxDI: two rows 0.69 ms), and the host's arg-maximum of each."""
    costs = estimate.cost.Overheads()
    estimator = estimate.Estimator("hbm-peak", costs, 1, samples=samples)
    found = estimator.graph(estimate.DECODE, 64, batch, [])
    assert found.latency_ns == costs.graph_ns + costs.host_ns + rows * 545_000
