"""lab/token.py: calls are counted as the loop makes them, and its page has what it makes."""

import statistics

import pytest

import llama
from lab import ROOT, pages, token

COSTS = token.published()


def test_calls_are_those_of_a_loop_that_knows_the_text():
    """A text that repeats itself: eight tokens a call once the guesser has seen a period."""
    text = token.Text("prompt", 0, 4, [5, 6, 7, 8] * 40)
    found = token.calls(text, 8)
    assert found.tokens == len(text.tokens) - 1 - text.prompt
    assert found.single + found.several <= 1 + -(-found.tokens // 8)
    alone = token.calls(token.Text("prompt", 0, 1, [*range(100, 160)]), 8)
    assert (alone.single, alone.several, alone.tokens) == (58, 0, 58)


def test_the_pages_have_the_ratios_of_the_recorded_texts():
    known = token.texts()
    prompts = [text for text in known if text.kind == "prompt"]
    found = [
        COSTS[len(text.tokens)].ratio(token.calls(text, llama.CALL_TOKENS)) for text in prompts
    ]
    assert len(found) == 25
    median, worst = statistics.median(found), min(found)
    assert median > 2.3 and worst > 1.4
    for page in (ROOT / "docs" / "speculation.md", ROOT / "README.md"):
        words = " ".join(page.read_text(encoding="utf-8").split())
        assert f"{median:.2f} times" in words and f"{worst:.2f} at worst" in words, page
    made, shown = token.of_texts(COSTS, known), pages.published(token.PAGE, "texts")
    for new, old in zip(made.splitlines()[2:], shown.splitlines()[2:], strict=True):
        *same, ms, ratio = new.strip("| ").split(" | ")
        *told, told_ms, told_ratio = old.strip("| ").split(" | ")
        assert same == told and float(ms) == pytest.approx(float(told_ms), abs=0.02)
        assert float(ratio) == pytest.approx(float(told_ratio), abs=0.02)


def test_a_step_has_its_band_and_both_readings_of_calls_that_are_short(tmp_path):
    """Calls 0.5 and 1 ms short: 10 over 8 is 11 over 9, or 10.5 to 11 over 8."""
    model = tmp_path / "model.md"
    model.write_text(
        "| one, a call | 10.00 | a | 9.50 | |\n| the same, a call | 8 | b | 7.00 | |\n"
        "| the same, a token | 9.9 | b | 2.00 | |\n"
    )
    costs = COSTS[640]._replace(baseline=8.0, plain=6.0, host=2.0, band=(5.0, 11.0))
    told = " ".join(token.of_a_step({640: costs}, model).split())
    for words in ("1.25 times", "5.00 to 11.00", "0.50 to 1.00 ms", "1.22 times", "1.31 to 1.38"):
        assert words in told
    shown = pages.published(ROOT / "docs" / "cost_model.md", "step")
    assert shown == token.of_a_step(COSTS), "python -m lab.token --write"
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    one = COSTS[640]
    assert f"takes {one.baseline + one.host:.2f} ms with the contest's baseline" in readme
    assert f"takes {one.plain + one.host:.2f} by plain steps" in readme


@pytest.mark.full
def test_costs_are_those_of_the_page():
    """Every estimate and the band of our step, which bands of a new set move."""
    told = token.of_costs({640: token.estimated(640)}).splitlines()[2]
    assert told in pages.published(token.PAGE, "costs"), "python -m lab.token --write"
