"""Files of an earlier benchmark run, damaged since."""

import dataclasses

import pytest

import main
from harness.inputs import command_line
from harness.modes import evaluate_all, preflight
from tests.tiny_model import write_tiny_model


@pytest.mark.parametrize("text", ["{"])
def test_a_damaged_run_is_not_resumed(text, tiny_model, tmp_path, capsys):
    folder = tmp_path / "20260101-000000"
    folder.mkdir()
    (folder / "run.json").write_text(text)
    arguments = ["--mode", "evaluate_all", "--model-path", str(tiny_model), "--limit", "1"]
    status = main.main([*arguments, "--results-path", str(tmp_path), "--resume"])
    told = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and f"delete {folder} and run again" in told


@pytest.mark.parametrize("text", ['{"id": 0,', '{"id": "x", "error": null}'])
def test_a_damaged_result_is_refused_before_the_others_run(
    text, tiny_model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        "harness.modes.evaluate_all._run_cases", lambda *_: pytest.fail("it runs prompts")
    )
    monkeypatch.setattr("harness.modes.evaluate_all._changed", lambda *_: [])
    (tmp_path / "20260101-000000").mkdir()
    (tmp_path / "20260101-000000" / "run.json").write_text("{}")
    result = tmp_path / "20260101-000000" / "prompt-00.json"
    result.write_text(text)
    arguments = ["--mode", "evaluate_all", "--model-path", str(tiny_model), "--limit", "2"]
    status = main.main([*arguments, "--results-path", str(tmp_path), "--resume"])
    told = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and f"delete {result} and run again" in told


def test_a_run_is_not_resumed_with_another_model_of_the_same_name(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.modes.evaluate_all._run_cases", interrupted)
    models = [write_tiny_model(tmp_path / folder / "same") for folder in ("one", "two")]

    def status(model, *arguments):
        command = ["--mode", "evaluate_all", "--model-path", str(model), "--limit", "1"]
        return main.main([*command, "--results-path", str(tmp_path / "results"), *arguments])

    assert status(models[0]) == 130
    assert status(models[0], "--resume") == 130  # it is taken up, and interrupted again
    assert status(models[1], "--resume") == 2
    assert "model_path, checkpoint" in capsys.readouterr().err.splitlines()[-1]
    assert status(models[0], "--resume", "--judge", "ties") == 2
    assert "inputs changed" in capsys.readouterr().err.splitlines()[-1]


SIZES = "--seq-len", "512", "--max-context-length", "32"


@pytest.mark.parametrize(
    ("more", "longest", "chunk"),
    [
        ((*SIZES, "--prefill-chunk", "24"), 32, 24),
        (SIZES, 32, 384),  # the largest below 512 that is no bucket
        (("--seq-len", "512"), 512, None),
        ((), 512, None),
    ],
)
@pytest.mark.parametrize("mode", ["evaluate_all", "preflight"])
def test_lengths_that_were_asked_for_stay(mode, more, longest, chunk, tiny_model):
    """A prompt of 300 tokens is fed in chunks where its graph is to hold 32."""
    texts = ["short", "a long one, " * 25]
    arguments = ["--mode", mode, "--model-path", str(tiny_model), "--tp-degree", "1", *more]
    settings = command_line.parse(arguments)
    if mode == "evaluate_all":
        _, _, session = evaluate_all._cases(settings, texts)
    else:
        session = preflight._open(dataclasses.replace(settings, prompts=tuple(texts)))
    found = session.settings
    assert (found.seq_len, found.max_context_length) == (512, longest)
    assert found.prefill_chunk == chunk
