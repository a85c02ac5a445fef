"""What public compilers and devices refuse, and their known open defects.

``refusals.json`` has an entry for each: the code or the compiler's words, the rule, chips, the
release in which it was seen, the public source, a form that shows it and the nearest legal one.
`by` names the check that recognises it; an entry without one says in `why` why there is none.

Where `turns` is set, the check of an entry is a warning that becomes a refusal on the entry's chips
and releases (`refusing`), and warns elsewhere. Defects only warn, with the thread's workaround.
"""

import functools
import json
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from .errors import consult, within
from .release import chosen, of_nki
from .spec import in_force

DATA = Path(__file__).with_name("refusals.json")
CHIPS = {2: "trn1", 3: "trn2", 4: "trn3"}  # by generation
LEGAL, REFUSED, UNPROVEN = OUTCOMES = ("legal", "refused", "unproven")
_local = threading.local()


class Refusal(NamedTuple):
    """One entry.

    Attributes:
        language: "nki", "neuronxcc", "any" of both, or "graph" (torch_neuronx.trace).
        chips: names, separated by blanks.
        release: of the SDK, in which it was seen; empty where the source does not tell.
        until: the last release that refuses it; empty where none is known to take it.
        constructs: names (provenance.py) that no form makes legal, separated by blanks.
        kernel, legal: a form that shows it, and the nearest one that is taken.
    """

    code: str
    rule: str
    language: str
    chips: str
    source: str
    kernel: str
    legal: str
    release: str = ""
    until: str = ""
    by: str = ""
    why: str = ""
    turns: bool = False
    constructs: str = ""

    def told(self) -> str:
        where = self.chips.replace(" ", ", ") + (f", SDK {self.release}" if self.release else "")
        source = self.source.replace("; ", ", ")
        return f"a device's compiler refuses it: {self.code}, {where}, {source}"


class Defect(NamedTuple):
    """A defect of a compiler or a device: `issue` names its thread or page."""

    issue: str
    what: str
    language: str
    chips: str
    releases: str
    workaround: str
    by: str = ""
    why: str = ""

    def told(self) -> str:
        return (
            f"{self.issue}: {self.what} ({self.chips.replace(' ', ', ')}, SDK {self.releases}), "
            f"expected its workaround: {self.workaround}"
        )


@functools.cache
def _data() -> dict[str, list[dict[str, Any]]]:
    return json.loads(DATA.read_text(encoding="utf-8"))


@functools.cache
def refusals() -> tuple[Refusal, ...]:
    return tuple(Refusal(**entry) for entry in _data()["refusals"])


@functools.cache
def defects() -> tuple[Defect, ...]:
    return tuple(Defect(**entry) for entry in _data()["defects"])


@functools.cache
def _by_check() -> dict[str, tuple[Refusal, ...]]:
    found: dict[str, list[Refusal]] = {}
    for entry in refusals():
        found.setdefault(entry.by, []).append(entry)
    found.pop("", None)
    return {name: tuple(entries) for name, entries in found.items()}


def speaking(today: bool) -> AbstractContextManager[None]:
    """Inside the block this thread's kernel is one of `nki`, or of `neuronxcc.nki`."""
    return within(_local, today=today)


def language() -> str:
    """The language of the kernel that this thread traces: "nki" or "neuronxcc"."""
    return "nki" if getattr(_local, "today", None) else "neuronxcc"


def refusing(identifier: str) -> Refusal | None:
    """The entry by which a check of this name refuses on the chip and release in force."""
    for entry in _by_check().get(identifier, ()):
        if (
            entry.turns
            and _holds(entry)
            and not (entry.until and _in_force() > _number(entry.until))
        ):
            return entry
    return None


def evidence(identifier: str) -> Refusal | None:
    """The same, or any entry of that check: what a refusal's report cites."""
    return refusing(identifier) or next(iter(_by_check().get(identifier, ())), None)


def defect(issue: str) -> Defect | None:
    """The known defect of an issue, where it holds on the chip and release in force."""
    for entry in defects():
        first, _, last = entry.releases.partition(" to ")
        if entry.issue.endswith(issue) and _holds(entry):
            return entry if _number(first) <= _in_force() <= _number(last or first) else None
    return None


def _holds(entry: Refusal | Defect) -> bool:
    return entry.language in (language(), "any") and CHIPS[in_force().number] in entry.chips.split()


def _in_force() -> tuple[int, ...]:
    return _number(of_nki() if language() == "nki" else chosen())


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


consult(refusing)
