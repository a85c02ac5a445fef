"""lab/token.py: calls are counted as the loop makes them, and the ratio is what its page says."""

from __future__ import annotations

import statistics

import llama
from lab import NOTES, token

COSTS = token.Costs(baseline=7.07, plain=5.99, several=7.24, host=2.23)  # of the page


def test_calls_are_those_of_a_loop_that_knows_the_text() -> None:
    """A text that repeats itself: eight tokens a call once the guesser has seen a period."""
    text = token.Text("prompt", 0, 4, [5, 6, 7, 8] * 40)
    found = token.calls(text, 8)
    assert found.tokens == len(text.tokens) - 1 - text.prompt
    assert found.single + found.several <= 1 + -(-found.tokens // 8)
    alone = token.calls(token.Text("prompt", 0, 1, [*range(100, 160)]), 8)
    assert (alone.single, alone.several, alone.tokens) == (58, 0, 58)


def test_the_page_has_the_ratios_of_the_recorded_texts() -> None:
    found = [
        COSTS.ratio(token.calls(text, llama.CALL_TOKENS))
        for text in token.texts()
        if text.kind == "prompt"
    ]
    assert len(found) == 23
    median, worst = statistics.median(found), min(found)
    assert median > 2.3 and worst > 1.4
    speculation = (NOTES.parents[1] / "docs" / "speculation.md").read_text(encoding="utf-8")
    assert f"{median:.2f} times" in speculation and f"{worst:.2f} at worst" in speculation


def test_each_text_has_its_prompt_and_640_tokens() -> None:
    for text in token.texts():
        assert 0 < text.prompt < len(text.tokens) - 50 and len(text.tokens) <= 640
        assert all(0 <= one < 49152 for one in text.tokens)
