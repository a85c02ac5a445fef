"""lab/roofline.py: what it prints, how it ends, and what it takes."""

from __future__ import annotations

import pytest

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
def test_bad_arguments_are_one_sentence(arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        roofline.main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and told in error and error.count("\n") == 1


@pytest.mark.parametrize(("target", "status"), [(99.0, 0), (1.0, 1)])
def test_a_row_beyond_its_target_ends_with_1(target, status, monkeypatch, capsys):
    row = roofline.Row("decode", 1, 128, target)
    monkeypatch.setattr(roofline, "ROWS", [row])
    assert roofline.main(["--rows", row.name, "--model", "smollm2-135m"]) == status
    assert row.name in capsys.readouterr().out
