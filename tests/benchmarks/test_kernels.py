"""benchmarks/kernels.py: the simulator beside Hugging Face's Llama, in one run."""

from __future__ import annotations

import re

import pytest

from benchmarks import kernels

TINY = kernels.Shape(2, 192, 4, 2, 64, 128, 256)


def test_both_models_are_timed_and_their_ratio_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hidden size that is no whole tiles, two ranks, prefill and decode."""
    monkeypatch.setitem(kernels.SHAPES, "tiny", TINY)
    assert kernels.main(["--shape", "tiny", "--tokens", "16", "--past", "32"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    found = re.findall(r"for 2 ranks .*?, ([\d.]+) times Hugging Face", text)
    assert len(found) == 2 and all(float(ratio) > 0 for ratio in found)


def test_hugging_face_runs_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers share weights, but each is there and has keys of its own in the cache."""
    calls = []
    original = kernels.LlamaDecoderLayer.forward

    def counted(self, *args, **kwargs):
        calls.append((self.self_attn.layer_idx, self.mlp.up_proj.weight.data_ptr()))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(kernels.LlamaDecoderLayer, "forward", counted)
    monkeypatch.setattr(kernels, "seconds", lambda run: (run(), 1.0)[1])
    assert kernels.hugging_face(TINY, 4, 8) == {"decode": 1.0, "prefill": 1.0}
    assert [index for index, _ in calls] == [0, 1] * 3  # the cache, a step, a prefill
    assert len({weight for _, weight in calls}) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--degree", "3"], "must divide the 32 query heads and 8 KV heads of llama-3.2-1b"),
        (["--shape", "smollm2-135m"], "must divide the 9 query heads"),
        (["--degree", "0"], "--degree"),
        (["--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["--past", "0"], "--past"),
        (["--shape", "x"], "invalid choice: 'x'"),
    ],
)
def test_what_cannot_be_measured(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        kernels.main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and told in error and error.count("\n") == 1
