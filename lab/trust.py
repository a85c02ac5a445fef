"""What pages for users say of the ruler: shares by what binds, the newest sealed set, all sets.

    python -m lab.trust

Every figure is read from the tables of lab/docs/calibration.md and put into docs/trust.md and
README.md; `lab.calibrate --write` does so too.
"""

import re
import statistics
import sys
import textwrap
from pathlib import Path

from lab import NOTES, ROOT, calibration_rows, pages
from neuron_cpu.core.report import bands

DOCUMENT, TRUST, README = NOTES / "calibration.md", ROOT / "docs" / "trust.md", ROOT / "README.md"
SEALED = calibration_rows.DATA.with_name("calibration_sealed.json")
UNMET = re.compile(r"^\| [\w.-]+ \| sealed \|.*\| ([\d.]+) \| (\w+)[^|]*\| [^|]+ \|$", re.M)
SETS = ("first", "second", "third", "fourth", "fifth", "newest")
NEAR = (0.15, 0.25)
WIDTH = 120  # of a page's lines
FEW = 20  # pairs, below which a share of them says little


def unmet(page: Path) -> dict[str, list[float]]:
    """Estimated over measured time, by class, of the rows of the page when they were sealed."""
    rows = [(float(ratio), kind) for ratio, kind in UNMET.findall(page.read_text())]
    members = {bands.ALL: [ratio for ratio, _ in rows]}
    return members | {k: [r for r, other in rows if other == k] for k in bands.CLASSES}


def shares(found: list[float]) -> list[str]:
    """How many ratios lie within ±15 and ±25 %."""
    return [f"{sum(abs(r - 1) <= far for r in found) / len(found):.0%}"[:-1] for far in NEAR]


def edges(found: list[float]) -> tuple[float, float]:
    """A band: percentiles 6 and 94, which hold 80 % of what is new (`held_by_others`)."""
    cuts = statistics.quantiles(found, n=50, method="inclusive")
    return cuts[2], cuts[46]


def spread(found: list[float]) -> str:
    """The band of some ratios."""
    return "{:.2f} to {:.2f}".format(*edges(found))


def held_by_others(page: Path) -> float:
    """The share of a sealed set's times that bands of the other sets hold, in the mean of sets."""
    sets = []
    for name in SETS:
        block = pages.published(page, "sealed" if name == SETS[-1] else f"{name} sealed set")
        sets.append([(kind, float(ratio)) for ratio, kind in UNMET.findall(block)])
    shares_held = []
    for at, told in enumerate(sets):
        others = [row for other in (*sets[:at], *sets[at + 1 :]) for row in other]
        held = 0
        for kind, ratio in told:
            own = [r for k, r in others if k == kind]
            low, high = edges(own if len(own) >= bands.FEWEST else [r for _, r in others])
            held += low <= ratio <= high
        shares_held.append(held / len(told))
    return statistics.fmean(shares_held)


def trust_table(page: Path) -> str:
    """Markdown: how near estimates of kernels came that the model had not met, by class."""
    lines = ["| Bound by | times | within ±15 % | within ±25 % | median ratio | band |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for kind, found in unmet(page).items():
        near = " | ".join(f"{share} %" for share in shares(found))
        middle = statistics.median(found)
        lines.append(f"| {kind} | {len(found)} | {near} | {middle:.2f} | {spread(found)} |")
    return "\n".join(lines)


def cells(block: str, first: str) -> list[str]:
    """Of the first line of a table that begins so: what follows, without signs of percent."""
    line = next(line for line in block.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip().rstrip("%") for cell in line.split("|")[2:-1]]


def set_figures(page: Path, name: str) -> tuple[list[str], int, int]:
    """The summary of a sealed set, pairs in order, and all of its pairs."""
    block = pages.published(page, "sealed" if name == SETS[-1] else f"{name} sealed set")
    found = cells(block[block.index("| Rows | published") :], "all")
    wrong, every = map(int, found[-1].split(" of "))
    return found, every - wrong, every


def newest(page: Path) -> str:
    """Paragraph and list: what the newest set had, and what to expect of a kernel not met yet."""
    block, found = pages.published(page, "sealed"), unmet(page)
    (published, run, *_), right, every = set_figures(page, SETS[-1])
    votes = cells(block[block.index("| Bound by | times | kernels") :], "all")
    aims = {
        name: cells(block, name)
        for kind in (bands.ALL, "latency")
        for name in (f"{kind}: kernels within ±15%", f"{kind}: kernels within ±25%")
    }
    (aim, near), (far_aim, far), (slow_aim, slow), (slowest_aim, slowest) = (
        one[:2] for one in aims.values()
    )
    pairs_aim = cells(block, "pairs in order")[0]
    sources = len({row.repository for row in calibration_rows.rows(SEALED)})
    text = (
        f"The newest check is the strictest: {published} times of {sources} sources, written down "
        f"before anybody estimated one; {run} ran. With one vote a kernel {near} % lie within "
        f"±15 % and {far} % within ±25 % (aimed at: {aim} and {far_aim}); by times {votes[2]} "
        f"and {votes[4]} %. Bound by latency the votes are {slow} and {slowest} % ({slow_aim} and "
        f"{slowest_aim}). Of {every} pairs {right / every:.0%} were in order ({pairs_aim} %). The "
        f"bands of that day, which should hold 80 %, held {votes[6]} %. Today's are wider and "
        f"count this set too: made of the other sets, they hold {held_by_others(page):.0%} of a "
        "set's times, in the mean of the six. Expect this of a kernel that nobody has seen:"
    )
    text = re.sub(r"(?<=\d)% (were|of)", r" % \1", text)
    dma, tensor, vector, slow_ones = (
        shares(found[kind])[1] for kind in ("DMA", "TensorE", "VectorE", "latency")
    )
    items = (
        f"**A kernel bound by DMA, TensorE or VectorE**: within a quarter in {dma}, {tensor} and "
        f"{vector} % of cases.",
        "**Chains of small instructions, each waiting for the last one** (*latency*): do not trust "
        f"the time. It is within a quarter in {slow_ones} % of cases, and the band reaches "
        f"from {spread(found['latency'])} of the device's time.",
    )
    wrapped = [textwrap.fill(text, WIDTH, break_on_hyphens=False), ""]
    for item in items:
        wrapped.append(textwrap.fill(item, WIDTH, initial_indent="- ", subsequent_indent="  "))
    return "\n".join(wrapped)


def sets_table(page: Path) -> str:
    """Markdown: each sealed set's times near their estimate, and pairs of variants in order."""
    lines = ["| Published times | within ±15 % of the estimate | order of two designs right |"]
    lines.append("|---|---:|---:|")
    for name in SETS:
        (_, run, near, *_), right, every = set_figures(page, name)
        order = f"{right / every:.0%}".replace("%", " %") if every >= FEW else ""
        lines.append(f"| {run} times, the {name} set | {near} % | {order} |".replace("  |", " |"))
    block, found = pages.published(page, "sealed"), set_figures(page, SETS[-1])[0]
    held = cells(block[block.index("| Bound by | times | kernels") :], "all")[6]
    told = (
        f"Of the newest set {found[3]} % lie within ±25 %, and bands made before it held {held} % "
        "in place of 80. Bands are made of these sets. Times for trn3 are *uncalibrated*."
    )
    return "\n".join([*lines, "", textwrap.fill(told, WIDTH)])


def publish(page: Path = DOCUMENT) -> None:
    """Put all of them into the pages."""
    pages.publish(TRUST, "trust", trust_table(page))
    pages.publish(TRUST, "newest", newest(page))
    pages.publish(README, "sets", sets_table(page))


def main() -> int:
    publish()
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
