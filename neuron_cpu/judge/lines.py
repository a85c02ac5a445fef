"""Two kernels line by line: which source lines cost more, or less, than before."""

import difflib
import linecache
from collections.abc import Sequence
from typing import NamedTuple

from ..core.program.storage import Source
from ..core.report import report
from ..core.time.schedule import Schedule


class Line(NamedTuple):
    """A source line that recorded instructions, and its time on the critical path."""

    number: int
    text: str
    time_ns: float


class Pair(NamedTuple):
    """A line of both kernels, or of one of them.

    Attributes:
        sign: " " where both have it, "-" where only the first has, "+" where only the second.
        place: line numbers, of both where they differ.
        before_ns, after_ns: nanoseconds of the critical path, None where a kernel lacks the line.
    """

    sign: str
    place: str
    text: str
    before_ns: float | None
    after_ns: float | None


def lines(found: Schedule) -> list[Line]:
    """The lines of a kernel, in the order of the file; one that calls another file counts there."""
    costs: dict[Source | None, report.Line] = {}
    for instruction in found.program.instructions:
        costs.setdefault(instruction.source, report.Line(report.place(instruction.source), ""))
    report.critical_times(found, costs)
    known = [source for source in costs if source is not None]
    known.sort(key=lambda source: (source.file, source.line))
    return [
        Line(s.line, linecache.getline(s.file, s.line).strip(), costs[s].critical) for s in known
    ]


def paired(before: Sequence[Line], after: Sequence[Line]) -> list[Pair]:
    """Both kernels' lines as a diff of their texts."""
    matcher = difflib.SequenceMatcher(
        None, [line.text for line in before], [line.text for line in after], autojunk=False
    )
    found = []
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            for one, two in zip(before[a:b], after[c:d]):
                same = one.number == two.number
                place = f"{one.number}" if same else f"{one.number} > {two.number}"
                found.append(Pair(" ", place, one.text, one.time_ns, two.time_ns))
            continue
        found += [Pair("-", f"{x.number}", x.text, x.time_ns, None) for x in before[a:b]]
        found += [Pair("+", f"{x.number}", x.text, None, x.time_ns) for x in after[c:d]]
    return found
