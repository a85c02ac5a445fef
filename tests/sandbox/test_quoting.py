"""Words of strangers print, wherever they come out."""

import json

import pytest

from neuron_cpu.__main__ import main
from neuron_cpu.oracle import forms
from neuron_cpu.oracle.serve import Oracle
from neuron_cpu.quoting import all_quoted, quoted

HOSTILE = "\ud800\x1b[2J\x1b]0;x\x07\n1 operators: correct\r\u202e\u0085"
RAISES = f"raise ValueError({HOSTILE!r})\n"
REFUSED = f"""
import neuronxcc.nki as nki
from neuron_cpu.core import NkiError

@nki.jit
def kernel(x):
    raise NkiError("sim_x", {HOSTILE!r})
"""


def test_every_letter_prints_or_is_an_escape():
    assert quoted(HOSTILE).isprintable() and quoted("naïve ↯ 中") == "naïve ↯ 中"
    assert quoted("a\nb\tc") == r"a\nb\tc" and quoted("a\nb\tc", lines=True) == "a\nb\tc"
    assert quoted("a" * 50, most=9) == "a" * 9
    assert all_quoted({"\x1b": ["\ud800", 1, None, ("\n",)]}) == {
        r"\x1b": [r"\ud800", 1, None, [r"\n"]]
    }


@pytest.mark.parametrize("text", [RAISES, REFUSED], ids=["raised", "refused"])
def test_an_answer_s_words_end_no_judge_and_forge_no_line(text, tmp_path, capsys):
    (tmp_path / "gelu.py").write_text(text)
    (tmp_path / "vector_add.py").write_text("")
    figures = tmp_path / "figures.json"
    only = ["--only", "gelu,vector_add", "--json", str(figures)]
    assert main(["judge", str(tmp_path), *only]) == 1
    said = "".join(capsys.readouterr())
    assert said.replace("\n", "").replace("\t", "").isprintable()
    assert not any(line.startswith("1 operators: correct") for line in said.splitlines())
    answers = json.loads(figures.read_text())["answers"]
    told = json.dumps(answers, ensure_ascii=False)
    assert len(answers) == 2 and told.isprintable() and r"ud800" in told


def test_a_candidate_s_words_come_back_quoted():
    oracle = Oracle(1)
    try:
        for text in (RAISES, REFUSED):
            kernel = {"name": "kernel", "source": text}
            asked = forms.request({"kernel": kernel, "cases": ["8x8:f32"]})
            assert isinstance(asked, forms.Request)
            answer = oracle.one(asked)
            assert answer["outcome"] in ("failed", "refused")
            assert json.dumps(answer, ensure_ascii=False).isprintable()
    finally:
        oracle.close()
