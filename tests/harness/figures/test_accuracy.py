"""Which differences pass: by the contest, in ties, and where something is not finite."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from harness.figures import accuracy
from harness.inputs import command_line
from harness.session.building import MANIFEST

VOCABULARY, TOKENS = 8, 4


class Letters:
    """Token n is the n-th letter."""

    def decode(self, tokens):
        return "".join(chr(97 + token) for token in tokens)


def logits(best, second, gap):
    """[TOKENS, 1, V] with the same two best tokens at every position."""
    scores = torch.linspace(1, 2, VOCABULARY).repeat(TOKENS, 1, 1)
    scores[..., best], scores[..., second] = 16.0, 16.0 - gap
    return scores


@pytest.fixture
def check(monkeypatch):
    """check_row on given logits of both sides."""

    def call(expected, actual, *arguments):
        sides = {"baseline": expected, "candidate": actual}

        def scores(loaded, ids, count, on_step, place=None):
            return sides[loaded.side][TOKENS - count :].clone()

        for name in ("_scores", "_known_scores"):
            monkeypatch.setattr(accuracy, name, scores)
        settings = command_line.parse(["--mode", "validate", *arguments])
        session = SimpleNamespace(settings=settings, tokenizer=Letters())
        loaded = [SimpleNamespace(side=side, session=session) for side in sides]
        return accuracy.check_row(*loaded, [1, 2, 3], TOKENS)

    return call


TIE = 0.0625  # half the bf16 spacing at 16


def test_a_tie_passes_and_the_contests_judgement_stands_beside_it(check):
    result = check(logits(3, 5, TIE), logits(5, 3, TIE))
    assert result.passed and result.contest_passed is False and len(result.divergences) == TOKENS
    assert "--judge contest): 4 greedy tokens differ" in result.lines()[-1]
    assert not check(logits(3, 5, TIE), logits(5, 3, TIE), "--judge", "contest").passed


def test_a_tie_excuses_no_other_difference(check):
    wrong = logits(5, 3, TIE)
    wrong[..., 0] = -16.0
    assert not check(logits(3, 5, TIE), wrong).passed


def test_an_error_far_from_rounding_is_not_excused_by_equal_tokens(check):
    wrong = logits(3, 5, 1.0)
    wrong[..., 0] = -16.0
    result = check(logits(3, 5, 1.0), wrong)
    for own, excused in ((0.03, True), (6.6, False)):
        told = dataclasses.replace(result, baseline_error=0.004, own_error=own).lines()
        assert any("two correct bf16 programs" in line for line in told) == excused


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("side", "told"), [(0, "the baseline's"), (1, "the submission's")])
def test_logits_that_are_not_finite_are_a_finding(value, side, told, check):
    sides = [logits(3, 5, 0.5), logits(3, 5, 0.5)]
    sides[side][2, 0, 6] = value
    result = check(*sides)
    assert not result.passed and result.not_finite is not None
    assert result.summary().startswith(f"FAILED: {told} logits at position 2, token 6 are {value}")


def test_end_tokens_that_are_masked_are_no_finding(check):
    sides = [logits(3, 5, 0.5), logits(3, 5, 0.5)]
    for scores in sides:
        scores[..., 0] = -math.inf
    assert check(*sides).passed


def test_the_baselines_logits_are_kept_until_what_made_them_changes(monkeypatch, tmp_path):
    """The second call reads them; other tokens, a changed model and damage do not."""
    calls = []

    def scores(loaded, ids, count, on_step, place=None):
        calls.append(ids)
        return logits(3, 5, 1.0)[:count]

    monkeypatch.setattr(accuracy, "_scores", scores)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = command_line.parse(["--mode", "validate"])
    session = SimpleNamespace(settings=settings, vocabulary=VOCABULARY)
    loaded = SimpleNamespace(session=session, folder=tmp_path)
    (tmp_path / MANIFEST).write_text("{}")
    first = accuracy.expected_of(loaded, None, [1, 2], TOKENS)
    again = accuracy.expected_of(loaded, None, [1, 2], TOKENS)
    assert torch.equal(first.baseline, again.baseline) and len(calls) == 1
    accuracy.expected_of(loaded, None, [1, 3], TOKENS)
    (tmp_path / MANIFEST).write_text("{ }")
    accuracy.expected_of(loaded, None, [1, 2], TOKENS)
    assert len(calls) == 3
    for file in tmp_path.rglob("*.npz"):
        file.write_bytes(file.read_bytes()[:-100])
    assert torch.equal(accuracy.expected_of(loaded, None, [1, 2], TOKENS).baseline, first.baseline)
    assert len(calls) == 4
