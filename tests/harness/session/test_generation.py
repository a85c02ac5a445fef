"""The driver's side of generation: how many tokens it takes, and where a chunk's tokens go."""

from types import SimpleNamespace

import pytest

from harness.processes.workers import SubmissionFailed
from harness.session import generation


def loaded(tokens, told=None):
    """A model that gives so many tokens, 1 and on, of a vocabulary of 9; it keeps what is asked."""

    def call(_, __, step, *, stop, **asked):
        model.asked = asked
        for token in range(1, tokens + 1):
            step([[token], 0.1])
        return SimpleNamespace(body=told, arrays=[])

    model = SimpleNamespace(session=SimpleNamespace(vocabulary=9), call=call)
    return model


def test_an_answer_may_end_early_unless_its_length_is_fixed():
    assert generation.generate_tokens(loaded(2), [[5]], 4) == [[1], [2]]
    assert generation.generate_tokens(loaded(4), [[5]], 4, fixed_length=True) == [
        [1],
        [2],
        [3],
        [4],
    ]
    for model, fixed in ((loaded(2), True), (loaded(0), False)):
        with pytest.raises(SubmissionFailed, match="expected 4 tokens, got"):
            generation.generate_tokens(model, [[5]], 4, fixed_length=fixed)
    with pytest.raises(SubmissionFailed, match="goes on after 4 tokens"):
        generation.generate_tokens(loaded(5), [[5]], 4)


def test_fewer_tokens_than_were_asked_for_are_told_once(capsys):
    settings = SimpleNamespace(seq_len=128, max_new_tokens=500)
    assert [generation.new_token_limit(settings, [[5] * 36]) for _ in "ab"] == [92, 92]
    assert capsys.readouterr().err.count("--max-new-tokens 500 is cut to 92, what --seq-len") == 1
    settings.max_new_tokens = 92
    assert generation.new_token_limit(settings, [[5] * 36]) == 92 and not capsys.readouterr().err
