"""The arithmetic of accuracy, speed, NKI share, score and reference figures."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from pydantic import TypeAdapter

from harness.errors import UserError
from harness.figures import accuracy, benchmark, evaluation, graphs, reference
from harness.figures.graphs import Graph, Operator
from harness.inputs import command_line
from harness.sdk import Source

FAST, BASE = (
    evaluation.Speed(50.0, 300.0, "device", 5.0),
    evaluation.Speed(100.0, 150.0, "device", 20.0),
)


class Letters:
    """Token n is the n-th letter."""

    def decode(self, tokens):
        return "".join(chr(97 + token) for token in tokens)


def test_score_is_the_product_of_its_factors():
    result = evaluation.score(True, 0.5, FAST, BASE)
    assert result.value == pytest.approx(2.0 * 2.0 * 1.5)
    assert result.ttft_value == pytest.approx(4.0 * 2.0 * 1.5)
    assert result.source == "device" and result.reason is None


def test_bands_of_estimated_times_count_twice_in_the_score():
    assert evaluation.score(True, 0.0, FAST, BASE).band is None
    speed = replace(
        FAST, source=Source.COST_MODEL, band_ms=(0.8 * FAST.latency_ms, 2 * FAST.latency_ms)
    )
    found = evaluation.score(True, 0.0, speed, BASE)
    assert found.band == pytest.approx((found.value / 4, found.value / 0.64))
    base = replace(BASE, source=Source.COST_MODEL, band_ms=(50.0, 100.0))
    both = evaluation.score(True, 0.0, speed, base)
    assert both.band == pytest.approx((found.value / 16, found.value / 0.64))


def test_an_inaccurate_submission_scores_zero():
    assert evaluation.score(False, 1.0, FAST, BASE).value == 0


@pytest.mark.parametrize("side", [0, 1])
def test_simulator_times_never_make_a_score(side):
    speeds = [FAST, BASE]
    speeds[side] = evaluation.Speed(1.0, 1.0, Source.SIMULATOR)
    result = evaluation.score(True, 1.0, *speeds)
    assert result.value is None and "not device times" in str(result.reason)


def graph(submodel, bucket, inside, outside):
    operators = (Operator("a", True, "k", inside), Operator("b", False, "mm", outside))
    return Graph(submodel, bucket, operators)


GRAPHS = [
    graph(graphs.PREFILL, 64, 90, 10),
    graph(graphs.PREFILL, 128, 100, 100),
    graph(graphs.DECODE, 64, 1, 1),
    graph(graphs.DECODE, 128, 3, 0),
]


def test_contest_share_counts_the_smallest_buckets_once():
    assert graphs.nki_share(GRAPHS, 100, 20).contest == pytest.approx(91 / 102)


def test_weighted_share_counts_each_graph_as_often_as_it_runs():
    # prompt of 62: prefill 64; three decode steps at lengths 63, 64 (bucket 64) and 65 (128)
    share = graphs.nki_share(GRAPHS, 62, 4)
    assert share.weighted == pytest.approx((90 + 1 + 1 + 3) / (100 + 2 + 2 + 3))
    told = [(graphs.PREFILL, "10.00"), (graphs.DECODE, "50.00")]
    assert share.outside == [f"{name}: b ({percent}% of its MACs)" for name, percent in told]


def test_comparison_leaves_masked_entries_out_and_finds_divergences():
    expected = torch.tensor([[8.0, 7.0, -math.inf, 0.0], [1.0, 2.0, -math.inf, 3.0]])
    actual = torch.tensor([[8.0, 7.0, -math.inf, 0.0], [1.0, 3.5, -math.inf, 3.0]])
    result = accuracy.compare(expected, actual, False, "m", Letters())
    assert result.greedy_match == 0.5 and result.positions == 2
    assert result.mse == pytest.approx(1.5**2 / 6) and result.max_abs_error == 1.5
    assert result.max_abs_logit == 8.0
    (divergence,) = result.divergences
    assert (divergence.position, divergence.margin, divergence.is_tie) == (1, 1.0, False)
    assert [c.text for c in divergence.expected[:2]] == ["d", "b"]
    assert divergence.actual[0].text == "b"


@pytest.mark.parametrize(("second", "is_tie"), [(29.875, True), (29.75, False)])
def test_ties_are_within_one_spacing(second, is_tie):
    expected, actual = torch.tensor([[30.0, second, 1.0]]), torch.tensor([[29.0, 30.0, 1.0]])
    result = accuracy.compare(expected, actual, False, "", Letters())
    assert [divergence.is_tie for divergence in result.divergences] == [is_tie]


def test_rows_of_the_contest_are_read(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("0,18,64,6697.38,101.53\n")
    (row,) = reference.read_rows(path)
    assert (row.model, row.source, row.latency_ms) == ("llama-3.2-1b", "published", 6697.38)
    path.write_text("0,18,64\n")
    with pytest.raises(UserError, match="line 1"):
        reference.read_rows(path)


def test_a_clone_of_a_contest_has_base_times_for_its_platforms(tmp_path, monkeypatch):
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    assert reference.files_of(tmp_path) == (tmp_path / "prompts.txt", tmp_path / "prompt_data.txt")
    path = tmp_path / "prompt_data_trn2.csv"
    path.write_text("Prompt ID, Context Length, Sequence Length, Base latency, Base throughput\n")
    path.write_text(path.read_text() + "0,18,64,12498,51.86\n")
    (row,) = reference.read_rows(reference.files_of(tmp_path)[1])
    assert (row.model, row.latency_ms, row.throughput) == ("qwen3-30b-a3b", 12498.0, 51.86)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    with pytest.raises(UserError, match="Cannot read .*prompt_data_trn3.csv: No such file"):
        reference.read_rows(reference.files_of(tmp_path)[1])


def test_baseline_figures_only_where_they_apply():
    nothing = command_line.parse(["--mode", "evaluate"])
    given = replace(nothing, base_latency=1.0, base_throughput=2.0)
    row = reference.Row(3, 10, 256, 700.0, 400.0, "llama-3.2-1b", "cost model")

    def source(*arguments):
        speed = reference.baseline_speed(*arguments)
        return speed and speed.source

    assert source(given, "other", 128, None) == "given"
    assert source(nothing, "Llama-3.2-1B", 256, row) == "cost model"
    assert source(nothing, "Llama-3.2-1B", 512, row) is None
    assert source(nothing, "SmolLM2-135M-Instruct", 256, row) is None
    assert source(nothing, "llama-3.2-1b", 640, None) == "published"


@pytest.mark.parametrize("decode", [None, {"latency_ms_avg": 1.0, "throughput": 2.0}])
def test_speed_reports_are_read_back_whole(decode):
    """With one new token there is no decode step."""
    made = benchmark.SpeedReport(
        {"throughput": 1.0},
        3.0,
        None,
        Source.SIMULATOR,
        1,
        1,
        runs=2,
        context_encoding_model={"throughput": 1.0},
        token_generation_model=decode,
    )
    written = json.loads(json.dumps(asdict(made)))
    assert TypeAdapter(benchmark.SpeedReport).validate_python(written) == made
