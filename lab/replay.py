"""Published searches replayed with estimates in place of device times.

    python -m lab.replay [--public DIR] [--write]

A search is the candidates of one operator in calibration.json, in their order there, with what a
device measured. Estimates are those of docs/cost_model.md, or made anew from checkouts in DIR.
``--write`` replaces the table of lab/docs/replay.md.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path

from lab import NOTES, calibrate, pages
from lab.calibrate import Outcome

FEW = 5  # candidates that a device would measure
NEAR = 0.03  # distance from the best that counts as found
TIED = 0.001  # estimates that differ by less are equal
DOCUMENT = NOTES / "replay.md"


@dataclass(frozen=True)
class Search:
    """Candidates of one operator, those with an estimate.

    Attributes:
        published: how many have a device time.
    """

    name: str
    set: str
    published: int
    tried: Sequence[Outcome]

    @property
    def best(self) -> float:
        return min(o.row.measured_us for o in self.tried)

    def regret(self, few: int) -> float:
        """How far the best measured of the `few` with the lowest estimates is from the best.

        Among equal estimates the slowest ones count as chosen.
        """
        rank = sorted(self.tried, key=lambda o: (self.level(o), -o.row.measured_us))
        return min(o.row.measured_us for o in rank[:few]) / self.best - 1

    def level(self, one: Outcome) -> float:
        """The lowest estimate that a chain of equal ones leads to."""
        reached = one.estimated_us or 0.0
        for other in sorted((o.estimated_us or 0.0 for o in self.tried), reverse=True):
            if reached * (1 - TIED) <= other < reached:
                reached = other
        return reached

    def by_chance(self, few: int) -> float:
        """How likely the best of `few` candidates chosen at random is within NEAR of the best."""
        others = sum(o.row.measured_us > (1 + NEAR) * self.best for o in self.tried)
        return 1 - comb(others, few) / comb(len(self.tried), few)

    @property
    def ties(self) -> int:
        """Pairs of equal estimates."""
        levels = [self.level(one) for one in self.tried]
        return sum(a == b for n, a in enumerate(levels) for b in levels[:n])

    @property
    def steps(self) -> tuple[int, int]:
        """Steps after which the kept candidate is within NEAR of what the device keeps; all."""
        kept = found = self.tried[0]
        near = 0
        for one in self.tried[1:]:
            found = min(found, one, key=lambda o: o.row.measured_us)
            if (one.estimated_us or 0.0) < (1 - TIED) * (kept.estimated_us or 0.0):
                kept = one
            near += kept.row.measured_us <= (1 + NEAR) * found.row.measured_us
        return near, len(self.tried) - 1


def searches(outcomes: Sequence[Outcome]) -> list[Search]:
    """Groups of more candidates than would be measured, all of them for the same arguments."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.row.group, []).append(outcome)
    found = []
    for name, members in groups.items():
        tried = [o for o in members if o.estimated_us is not None]
        if len(tried) > FEW and len({o.row.arguments for o in members}) == 1:
            found.append(Search(name, members[0].row.set, len(members), tried))
    return found


def table(found: Sequence[Search]) -> str:
    """Markdown: a search a row, the worst first, and what they come to."""
    lines = [
        "| Search | set | candidates | estimated | regret of the best one | of the best five | "
        "ties | steps kept | runs spared |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in sorted(found, key=lambda s: (-s.regret(FEW), -s.regret(1))):
        number = len(one.tried)
        near, steps = one.steps
        lines.append(
            f"| {one.name} | {one.set} | {one.published} | {number} | {one.regret(1):.1%} | "
            f"{one.regret(FEW):.1%} | {one.ties} | {near} of {steps} | {number - FEW} |"
        )
    hits = sum(one.regret(FEW) <= NEAR for one in found)
    first = sum(one.regret(1) <= NEAR for one in found)
    chance = [sum(search.by_chance(few) for search in found) for few in (FEW, 1)]
    spared = sum(len(search.tried) - FEW for search in found)
    lines += [
        "",
        f"Within {NEAR:.0%} of the best: {hits} of {len(found)} searches with the best five by "
        f"estimate, {first} with the best one;",
        f"chosen at random five would be in {chance[0]:.1f} and one in {chance[1]:.1f}. "
        f"{spared} of {sum(len(search.tried) for search in found)} device runs are spared.",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--public", type=Path, metavar="DIR", help="checkouts of public kernels")
    parser.add_argument("--write", action="store_true", help="update lab/docs/replay.md")
    args = parser.parse_args()
    every = calibrate.public_rows.rows()
    groups = [row.group for row in every]
    chosen = [row for row in every if args.public and groups.count(row.group) > FEW]
    anew = {o.row.id: o for o in calibrate.run_all(chosen, 1, public=args.public) if not o.missing}
    text = table(searches([anew.get(row.id) or calibrate.on_page(row) for row in every]))
    print(text)
    if args.write:
        pages.publish(DOCUMENT, "replay", text)
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
