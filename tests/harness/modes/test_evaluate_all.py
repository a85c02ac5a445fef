"""Files of an earlier benchmark run, damaged since."""

from __future__ import annotations

from pathlib import Path

import pytest

import main


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_run_is_not_resumed(
    text: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "20260101-000000"
    folder.mkdir()
    (folder / "run.json").write_text(text)
    arguments = ["--mode", "evaluate_all", "--model-path", str(tiny_model), "--limit", "1"]
    status = main.main([*arguments, "--results-path", str(tmp_path), "--resume"])
    told = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and f"delete {folder} and run again" in told


def test_a_damaged_result_is_refused_before_the_others_run(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "harness.modes.evaluate_all._run_cases", lambda *_: pytest.fail("it runs prompts")
    )
    monkeypatch.setattr("harness.modes.evaluate_all._check_same", lambda *_: None)
    (tmp_path / "20260101-000000").mkdir()
    (tmp_path / "20260101-000000" / "run.json").write_text("{}")
    result = tmp_path / "20260101-000000" / "prompt-00.json"
    result.write_text('{"id": 0,')
    arguments = ["--mode", "evaluate_all", "--model-path", str(tiny_model), "--limit", "2"]
    status = main.main([*arguments, "--results-path", str(tmp_path), "--resume"])
    told = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and f"delete {result} and run again" in told
