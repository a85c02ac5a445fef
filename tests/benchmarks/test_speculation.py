"""The benchmark's replay of a lookup, by hand, and heads that are learnt in seconds."""

from __future__ import annotations

import pytest

from benchmarks import speculation
from benchmarks.speculation import Answer, Calls


def test_a_quotation_is_replayed_call_by_call():
    """The first token is the prefill's; 7 has no match, and then the prompt is read on."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    answer = Answer(prompt, [40, 3, 4, 5, 6, 7, 50, 60])
    assert answer.quoted == pytest.approx(2 / 5)
    # 40: nothing. 3: guesses 4 5 6, all right, and 7. 7: guesses 8 9 40, wrong, 50. 50: nothing.
    assert speculation.replay(answer, 3) == Calls(guessed=2, alone=2, tokens=7)
    assert speculation.replay(answer, 1) == Calls(guessed=3, alone=2, tokens=7)
    assert Calls(2, 2, 7).milliseconds(7.0, 3.5) == 3.0


def test_calls_add_up():
    assert speculation.added([Calls(1, 2, 3), Calls(4, 5, 6)]) == Calls(5, 7, 9)
