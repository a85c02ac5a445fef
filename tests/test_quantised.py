"""`--quantize` and its kin as users run them: made once, refused where nothing fits, reported."""

import math

import pytest

LENGTHS = ("--seq-len", "64", "--max-new-tokens", "4")
PROMPT = ("--prompt", "hello")


@pytest.fixture(scope="module")
def run(run_main, tiny_model, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))

    def main(mode, *arguments):
        lengths = LENGTHS if mode != "perplexity" else LENGTHS[:2]
        model = ("--mode", mode, "--model-path", tiny_model)
        return run_main(*model, *lengths, *arguments, XDG_CACHE_HOME=cache)

    return main


@pytest.mark.full
def test_the_checkpoint_is_made_once_and_scores_name_what_a_contest_says(run):
    first = run("generate", "--quantize", "int8", *PROMPT)
    assert first.returncode == 0, first.stderr
    assert "(int8 weights, one scale a channel; once)" in first.stderr
    scored = run("evaluate", "--quantize", "int8", *PROMPT)
    assert scored.returncode in (0, 1), scored.stderr
    assert "Quantising" not in scored.stderr
    assert "a contest compares logits with the float model's" in scored.stderr
    assert " of 1 prompts fail" in scored.stderr
    checked = run("validate", "--quantize", "int8", *PROMPT)
    assert checked.returncode == 0, checked.stdout + checked.stderr  # both sides quantised


@pytest.mark.full
def test_perplexity_of_a_float_and_a_quantised_model(run, tiny_model):
    """The first against transformers' Llama on the same runs of the text."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    from harness.modes.perplexity import GIVEN, TEXT, runs_of

    done = run("perplexity", "--quantize", "int8", "--torch-dtype", "float32", "--tp-degree", "1")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if " weights" in line]
    assert [row[0] for row in rows[:2]] == ["float32", "int8"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    runs = torch.tensor(runs_of(tokenizer(TEXT.read_text("utf-8"))["input_ids"], 64))
    model = LlamaForCausalLM.from_pretrained(tiny_model, torch_dtype=torch.float32)
    with torch.inference_mode():
        likely = model(runs).logits.log_softmax(-1)[:, GIVEN - 1 : -1]
    losses = -likely.gather(2, runs[:, GIVEN:, None])
    expected = math.log(float(rows[0][2]))
    assert expected == pytest.approx(float(losses.mean()), rel=1e-4)
    assert rows[0][-1] == str(losses.numel())
    assert math.log(float(rows[1][-3])) == pytest.approx(expected, rel=0.01)
