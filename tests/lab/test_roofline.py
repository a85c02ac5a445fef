"""lab/roofline.py: what it prints, how it ends, and what it takes."""

import pytest

from lab import roofline


@pytest.mark.parametrize(("target", "status"), [(99.0, 0), (1.0, 1)])
def test_a_row_beyond_its_target_ends_with_1(target, status, monkeypatch, capsys):
    row = roofline.Row("decode", 1, 128, target)
    monkeypatch.setattr(roofline, "ROWS", [row])
    assert roofline.main(["--rows", row.name, "--model", "smollm2-135m"]) == status
    assert row.name in capsys.readouterr().out
