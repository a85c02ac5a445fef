"""lab/roofline.py: what it prints, how it ends, and what it takes."""

from __future__ import annotations

import pytest

from harness.model_shapes import MODEL_SHAPES
from lab import roofline


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rows", "decode-129"], "invalid choice: 'decode-129'"),
        (["--model", "llama"], "invalid choice: 'llama'"),
        (["--dma-profile", "x"], "invalid choice: 'x' (choose from"),
        (["--all", "--rows", "decode-128"], "not allowed with argument"),
    ],
)
def test_bad_arguments_are_one_sentence(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        roofline.main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and told in error and error.count("\n") == 1


@pytest.mark.parametrize(("target", "status"), [(99.0, 0), (1.0, 1)])
def test_a_row_beyond_its_target_ends_with_1(
    target: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = roofline.Row("decode", 1, 128, target)
    monkeypatch.setattr(roofline, "ROWS", [row])
    assert roofline.main(["--rows", row.name, "--model", "smollm2-135m"]) == status
    assert row.name in capsys.readouterr().out


def test_a_graph_that_is_too_large_misses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from neuron_cpu.runtime import graph

    monkeypatch.setattr(graph, "MOST_INSTRUCTIONS", 1000)
    assert roofline.main(["--rows", "decode-128", "--model", "smollm2-135m"]) == 1
    assert "decode-128: token_generation_model, bucket 128, has" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(MODEL_SHAPES))
def test_two_ranks_share_all_heads(name: str) -> None:
    """Also where the degree does not divide them: the limits ask for the work alone."""
    config = MODEL_SHAPES[name]
    attention, mlp, head = roofline.stretches(
        config, 1, roofline.Call(roofline.DECODE, 1, roofline.ROWS[0].length)
    )
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    width, d = config["hidden_size"], config["head_dim"]
    weights = width * d * (2 * heads[0] + 2 * heads[1]) + 2 * heads[1] * d * 128
    assert attention.bytes == pytest.approx(weights)  # bf16, half of it a rank
    assert mlp.bytes == pytest.approx(3 * width * config["intermediate_size"])
    assert head.bytes == pytest.approx(width * config["vocab_size"])
