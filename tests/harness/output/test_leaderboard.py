"""Several submissions in one table: places, normalised points, names."""

from harness.figures.benchmark import SpeedReport
from harness.figures.evaluation import Evaluation, Figures, Score, Speed, Speeds
from harness.figures.graphs import NkiShare
from harness.output import report
from harness.sdk import Source


def result(index, points, accurate=True, latency=10.0, share=0.5):
    """One prompt with a score; `points` None: its times make none."""
    speed = Speed(latency, 5.0, Source.DEVICE)
    figures = {"latency_ms_p99": latency, "throughput": 5.0}
    report = SpeedReport(figures, 1.0, 5.0, Source.DEVICE, 3, 1)
    reason = "no times" if points is None else None
    scored = Score(accurate, share, speed, speed, 1.0, 1.0, points, points, reason)
    found = Figures([], NkiShare(share, share, [], []), Speeds(report, None), scored)
    return Evaluation(index, ["?"], 4, 128, 1, 3, accurate=accurate, figures=found)


def failed(index):
    return Evaluation(index, ["?"], 4, 128, 1, 3, error="it raised")


def test_points_are_normalised_against_the_best_of_each_prompt():
    table = report.standings(
        {
            "slow": [result(0, 2.0), result(1, 1.0), result(2, 3.0)],
            "broken": [failed(0), failed(1), failed(2)],
            "fast": [result(0, 4.0), result(1, 0.0, accurate=False), failed(2)],
        }
    )
    assert [one.submission for one in table] == ["slow", "fast", "broken"]
    assert [one.normalised for one in table] == [2.5, 1.0, 0.0]
    assert [one.points for one in table] == [6.0, 4.0, 0.0]
    assert [(one.accurate, one.prompts) for one in table] == [(3, 3), (1, 3), (0, 3)]
    assert table[1].latency_ms == 10.0 and table[2].latency_ms is None


def test_a_prompt_that_nobody_gets_right_gives_nobody_points():
    wrong = [result(0, 0.0, accurate=False)]
    assert [one.normalised for one in report.standings({"a": wrong, "b": wrong})] == [0, 0]
