"""A table of several submissions, with the contest's points.

Points of a prompt are the score; a submission's normalised points of a prompt are its points over
those of the best submission there, so that every prompt counts the same (the contest's rules:
"normalized against the best submitted solution", asplos-contest/2025, OPTNKI.md, which leaves open
whether prompt by prompt). Inaccurate and failed prompts have none.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

from harness.figures.evaluation import Evaluation
from harness.output.report import PIPED_WIDTH, shown
from neuron_cpu.console import terminal
from neuron_cpu.files import write_text_atomically

LEADERBOARD_JSON = "leaderboard.json"
COLUMNS = (
    "place", "submission", "normalised", "points", "accurate", "prompts", "latency ms", "NKI share"
)  # fmt: skip
EXPENDABLE = ("NKI share", "latency ms", "accurate")


@dataclass(frozen=True)
class Standing:
    """A submission's figures over all prompts; means are of the prompts that ran."""

    submission: str
    normalised: Optional[float]
    points: Optional[float]
    accurate: int
    prompts: int
    latency_ms: Optional[float]
    nki_share: Optional[float]


def names(paths: Sequence[Path]) -> list[str]:
    """A name for each submission that is a folder's name, too: its stem, with more where needed."""
    chosen: list[str] = []
    for path in paths:
        stem = path.stem
        if [other.stem for other in paths].count(stem) > 1:
            stem = f"{path.parent.name}-{stem}" if path.parent.name else stem
        name, count = stem, 1
        while name in chosen:
            count += 1
            name = f"{stem}-{count}"
        chosen.append(name)
    return chosen


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


def _points(result: Evaluation) -> Optional[float]:
    """The contest's points of a prompt: 0 where it failed, None where times make no score."""
    return 0.0 if result.figures is None else result.figures.score.value


def _mean(values: Sequence[float]) -> Optional[float]:
    return sum(values) / len(values) if values else None


def show(results: Mapping[str, Sequence[Evaluation]]) -> None:
    """Print the table."""
    columns = (name if name == "submission" else f">{name}" for name in COLUMNS)
    table = terminal.table_of("|".join(columns), "Leaderboard")
    for place, one in enumerate(standings(results), start=1):
        cells = [place, one.submission, one.normalised, one.points, one.accurate, one.prompts]
        table.add_row(*map(shown, [*cells, one.latency_ms, one.nki_share]))
    terminal.print_table(
        terminal.output(PIPED_WIDTH), table, EXPENDABLE, "", f"{LEADERBOARD_JSON} has all"
    )
    terminal.printed(
        "Normalised points: a prompt's points over those of the best submission there, summed; "
        "latency and share are means."
    )


def write(folder: Path, results: Mapping[str, Sequence[Evaluation]]) -> None:
    """The table as JSON, in the order of places."""
    content = [asdict(one) for one in standings(results)]
    write_text_atomically(folder / LEADERBOARD_JSON, json.dumps(content, indent=1) + "\n")
