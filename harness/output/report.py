"""Results on the terminal and as JSON and CSV; every figure with its source."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.figures.benchmark import SpeedReport
from harness.figures.evaluation import Evaluation, Score
from harness.figures.graphs import DECODE, PREFILL
from harness.inputs.prompts import shorten
from neuron_cpu.console import terminal
from neuron_cpu.files import write_text_atomically

REPORT_JSON = "report.json"
REPORT_CSV = "report.csv"

COLUMNS = (
    "prompt", "tokens", "length", "new", "checked", "accurate", "greedy match", "NKI share",
    "latency ms", "tokens/s", "TTFT ms", "tokens a step", "source", "score", "score (TTFT)",
    "score source",
)  # fmt: skip
# Columns that a narrow terminal does without, the first one first.
EXPENDABLE = (
    "score source", "source", "tokens a step", "length", "greedy match", "score (TTFT)", "checked",
    "NKI share", "TTFT ms", "tokens", "new",
)  # fmt: skip
PIPED_WIDTH = 160


def row(result: Evaluation) -> dict[str, Any]:
    """One result as one flat row: COLUMNS to values, None where there is no figure."""
    flat: dict[str, Any] = dict.fromkeys(COLUMNS)
    flat |= dict(prompt=result.id, tokens=result.prompt_tokens, accurate=result.accurate)
    # the length that the times are of, and the tokens that were made and compared
    flat |= dict(length=result.seq_len, new=result.new_tokens)
    figures = result.figures
    if figures is None:
        return flat
    speed, checked = figures.speed.best, figures.accuracy
    return flat | {
        "checked": min(item.positions for item in checked),
        "greedy match": sum(item.greedy_match for item in checked) / len(checked),
        "NKI share": figures.nki.contest,
        "latency ms": speed.e2e_model["latency_ms_p99"],
        "tokens/s": speed.tokens_per_second,
        "TTFT ms": speed.ttft_ms,
        "tokens a step": speed.speculation and speed.speculation.tokens_per_call,
        "source": str(speed.source),
        "score": figures.score.value,
        "score (TTFT)": figures.score.ttft_value,
        "score source": figures.score.source,
    }


def shown(value: Any) -> str:
    """A cell for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def line(result: Evaluation) -> str:
    """One result as one status line."""
    start = f"prompt {result.id}: "
    if result.error is not None:
        return start + result.error
    flat = row(result)
    verdict = "accurate" if result.accurate else "NOT ACCURATE"
    return start + (
        f"{verdict}, {shown(flat['latency ms'])} ms, {shown(flat['tokens/s'])} tokens/s "
        f"({flat['source']}), score {shown(flat['score'])}"
    )


def totals(results: Sequence[Evaluation]) -> dict[str, Any]:
    """Counts, and the contest's total with the mean beside it."""
    scores = [result.figures.score.value for result in results if result.figures]
    known = [value for value in scores if value is not None]
    return {
        "prompts": len(results),
        "accurate": sum(result.accurate for result in results),
        "failed": sum(result.error is not None for result in results),
        "total_score": sum(known) if known else None,
        "mean_score": _mean(known),
    }


def print_summary(results: Sequence[Evaluation], not_run: Sequence[str]) -> None:
    """Print the table of all prompts, totals, and errors."""
    rows = [row(result) for result in results]
    # Sources that are the same everywhere stand in the lines below.
    columns = [
        name
        for name in COLUMNS
        if "source" not in name or len({cells[name] for cells in rows if cells[name]}) > 1
    ]
    if not any(cells["tokens a step"] for cells in rows):
        columns.remove("tokens a step")
    justified = (name if "source" in name else f">{name}" for name in columns)
    table = terminal.table_of("|".join(justified), "Results")
    for cells in rows:
        table.add_row(*(shown(cells[name]) for name in columns))
    terminal.print_table(
        terminal.output(PIPED_WIDTH), table, EXPENDABLE, "", f"{REPORT_CSV} has all"
    )
    told: dict[str, str] = {}  # sources -> what is from them
    for column, what in (("source", "Times"), ("score source", "scores")):
        found = ", ".join(sorted({cells[column] for cells in rows if cells[column]}))
        told[found] = f"{told[found]} and {what}" if found in told else what.capitalize()
    for found, what in told.items():
        if found:
            terminal.printed(f"{what} are from: {found}.")
    summary = totals(results)
    terminal.printed(
        f"{summary['accurate']} of {summary['prompts']} prompts accurate, {summary['failed']} "
        f"failed. Total score: {shown(summary['total_score'])}, mean {shown(summary['mean_score'])}"
    )
    for text in [*_whole_answers(results), *not_run, *_problems(results)]:
        terminal.printed(text)


def _whole_answers(results: Sequence[Evaluation]) -> list[str]:
    """How many tokens the calls of a submission that looks ahead by itself were counted over."""
    speeds = [result.figures.speed.best for result in results if result.figures]
    counts = [s.speculation.tokens + 1 for s in speeds if s.speculation and s.plain_ms is not None]
    if not counts:
        return []
    told = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return [f"Scores count look-ahead's calls over whole answers, of {told} tokens."]


def _problems(results: Sequence[Evaluation]) -> list[str]:
    problems = [f"prompt {r.id}: {r.error}" for r in results if r.error is not None]
    done = [result.figures for result in results if result.figures]
    problems += sorted({figures.score.reason for figures in done if figures.score.reason})
    problems += sorted({warning for figures in done for warning in figures.nki.warnings})
    return problems


def of_quantised(words: str, results: Sequence[Evaluation]) -> list[str]:
    """The contest's verdict on quantised weights or caches, and by how much they fail: one
    sentence, or none where `words` names no quantised part."""
    rows = [row for result in results if result.figures for row in result.figures.accuracy]
    known = [row for row in rows if row.max_abs_error is not None]
    if not words or not known:
        return []
    failed = sum(not row.passed or row.contest_passed is False for row in rows)
    equal = sum(row.greedy_match for row in known) / len(known)
    worst = max(known, key=lambda row: row.max_abs_error or 0.0)
    scores = [result.figures.score for result in results if result.figures]
    factors = [s for s in scores if s.reduced_latency and s.increased_throughput]
    unchecked = sum(
        (s.reduced_latency or 0) * (s.increased_throughput or 0) * (1 + s.nki_share)
        for s in factors
    )
    without = f"; without that check the scores would sum to {unchecked:.4g}" if factors else ""
    return [
        f"Quantised ({words}): a contest compares logits with the float model's and would refuse "
        f"these weights where they fail: {failed} of {len(rows)} prompts fail, {equal:.1%} of the "
        f"greedy tokens are equal, the largest error is {worst.max_abs_error:.3g} on logits up to "
        f"{worst.max_abs_logit:.3g}{without}."
    ]


def print_result(result: Evaluation) -> None:
    """Everything about one batch, as the contest's driver prints it and then some."""
    terminal.printed(f"Prompt: {shorten(result.prompts[0])}")
    if result.figures is None:
        terminal.printed(f"Failed: {result.error}")
        return
    _print_score(result.figures.score)
    for index, checked in enumerate(result.figures.accuracy):
        terminal.printed(f"Row {index}: " + "\n".join(checked.lines()))
    print_speed("measured", result.figures.speed.measured)
    print_speed("estimated", result.figures.speed.estimated)
    share = result.figures.nki
    terminal.printed(f"NKI share of MACs: {share.contest:.4f}, by use {share.weighted:.4f}")
    for text in share.outside:
        terminal.printed(f"  outside NKI: {text}")
    for text in share.warnings:
        terminal.printed(f"  {text}")


def _print_score(score: Score) -> None:
    if score.value is None:
        terminal.printed(f"Final Score: none ({score.reason})")
        return
    band = ""
    if score.band is not None:
        band = f"; {score.band[0]:.4f} to {score.band[1]:.4f} by the cost model's band"
    terminal.printed(f"Final Score: {score.value:.4f} (figures: {score.source}{band})")
    if score.ttft_value is not None:
        terminal.printed(f"Score with the time to the first token: {score.ttft_value:.4f}")
    terminal.printed(f"\tAccuracy: {score.accurate}")
    terminal.printed(f"\tReduced latency: {score.reduced_latency:.4f}")
    terminal.printed(f"\tIncreased throughput: {score.increased_throughput:.4f}")
    terminal.printed(f"\tNKI FLOPs Ratio: {score.nki_share:.4f}")


def print_speed(name: str, speed: SpeedReport | None) -> None:
    """One report with its source, a line for each part of the model."""
    if speed is None:
        terminal.printed("No estimate of device times is available.")
        return
    terminal.printed(f"Speed, {name} ({speed.source.label}), {speed.new_tokens} new tokens:")
    rate = shown(speed.tokens_per_second)
    terminal.printed(f"\tfirst token after {speed.ttft_ms:.2f} ms, then {rate} tokens/s")
    for part in ("e2e_model", PREFILL, DECODE):
        figures = getattr(speed, part)
        if figures is not None:
            terminal.printed(f"\t{part}: {_latencies(figures)}")
    if speed.speculation is not None:
        terminal.printed(f"\t{speed.speculation.describe()}")
        if speed.plain_ms is not None:
            told = f"\tmeasured on the {speed.speculation.tokens + 1} tokens behind this prompt"
            terminal.printed(f"{told}; without guesses a token takes {speed.plain_ms:.2f} ms")


def _latencies(figures: dict[str, float]) -> str:
    """Percentiles of several runs, or one number where all runs are equal."""
    times = {
        key.removeprefix("latency_ms_"): f"{ms:.2f}"
        for key, ms in figures.items()
        if key.startswith("latency_ms_")
    }
    told = ", ".join(f"{name} {ms}" for name, ms in times.items())
    told = times["avg"] if len(set(times.values())) == 1 else told
    return f"latency {told} ms, {figures['throughput']:.2f} tokens/s"


def write_all(
    folder: Path,
    description: dict[str, Any],
    results: Sequence[Evaluation],
    not_run: Sequence[str],
    notes: Sequence[str] = (),
) -> None:
    """The report files; the JSON last, because it marks the run as finished."""
    write_text_atomically(folder / REPORT_CSV, to_csv(results))
    content = {
        "run": description,
        "totals": totals(results),
        "not_run": list(not_run),
        "notes": list(notes),
        "results": list(map(asdict, results)),
    }
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_text_atomically(folder / REPORT_JSON, text)


def to_csv(results: Sequence[Evaluation]) -> str:
    """One row a prompt; empty cells where there is no figure."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row(result) for result in results)
    return buffer.getvalue()


LEADERBOARD_JSON = "leaderboard.json"
STANDING = (
    "place", "submission", "normalised", "points", "accurate", "prompts", "latency ms", "NKI share"
)  # fmt: skip
STANDING_EXPENDABLE = ("NKI share", "latency ms", "accurate")


@dataclass(frozen=True)
class Standing:
    """A submission's figures over all prompts; means are of the prompts that ran."""

    submission: str
    normalised: float | None
    points: float | None
    accurate: int
    prompts: int
    latency_ms: float | None
    nki_share: float | None


def submission_names(paths: Sequence[Path]) -> list[str]:
    """A name for each submission that is a folder's name, too: its stem, with a number where
    another has the same."""
    stems = [path.stem for path in paths]
    return [
        f"{stem}-{number}" if stems.count(stem) > 1 else stem
        for number, stem in enumerate(stems, 1)
    ]


def standings(results: Mapping[str, Sequence[Evaluation]]) -> list[Standing]:
    """The best one first; None for points that no prompt can have (`Score.reason`)."""
    best: dict[int, float] = {}
    for found in results.values():
        for result in found:
            best[result.id] = max(best.get(result.id, 0.0), _points(result) or 0.0)
    table = [_standing(name, found, best) for name, found in results.items()]
    return sorted(table, key=lambda one: (-(one.normalised or 0), -(one.points or 0)))


def _standing(name: str, found: Sequence[Evaluation], best: Mapping[int, float]) -> Standing:
    points = {result.id: _points(result) for result in found}
    known = {index: value for index, value in points.items() if value is not None}
    figures = [result.figures for result in found if result.figures is not None]
    return Standing(
        submission=name,
        normalised=(
            sum(value / best[index] for index, value in known.items() if best[index])
            if known
            else None
        ),
        points=sum(known.values()) if known else None,
        accurate=sum(result.accurate for result in found),
        prompts=len(found),
        latency_ms=_mean([one.speed.best.e2e_model["latency_ms_p99"] for one in figures]),
        nki_share=_mean([one.nki.contest for one in figures]),
    )


def _points(result: Evaluation) -> float | None:
    """The contest's points of a prompt: 0 where it failed, None where times make no score."""
    return 0.0 if result.figures is None else result.figures.score.value


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def show_leaderboard(results: Mapping[str, Sequence[Evaluation]]) -> None:
    """Print the table."""
    columns = (name if name == "submission" else f">{name}" for name in STANDING)
    table = terminal.table_of("|".join(columns), "Leaderboard")
    for place, one in enumerate(standings(results), start=1):
        cells = [place, one.submission, one.normalised, one.points, one.accurate, one.prompts]
        table.add_row(*map(shown, [*cells, one.latency_ms, one.nki_share]))
    terminal.print_table(
        terminal.output(PIPED_WIDTH), table, STANDING_EXPENDABLE, "", f"{LEADERBOARD_JSON} has all"
    )
    terminal.printed(
        "Normalised points: a prompt's points over those of the best submission there, summed; "
        "latency and share are means."
    )


def write_leaderboard(folder: Path, results: Mapping[str, Sequence[Evaluation]]) -> None:
    """The table as JSON, in the order of places."""
    content = [asdict(one) for one in standings(results)]
    write_text_atomically(folder / LEADERBOARD_JSON, json.dumps(content, indent=1) + "\n")
