"""`--quantize` and its kin as users run them: made once, refused where nothing fits, reported."""

import pytest

LENGTHS = ("--seq-len", "64", "--max-new-tokens", "4")
PROMPT = ("--prompt", "hello")


@pytest.fixture(scope="module")
def run(run_main, tiny_model, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))

    def main(mode, *arguments):
        model = ("--mode", mode, "--model-path", tiny_model)
        return run_main(*model, *LENGTHS, *arguments, XDG_CACHE_HOME=cache)

    return main


@pytest.mark.libraries
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
