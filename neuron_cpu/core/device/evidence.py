"""What public runs on devices show (``evidence.json``, which lab/provenance_table.py makes).

``sources`` are places: a run has the commit that ran, its chip and its release; pages have none of
these. ``constructs`` has status and source of names and forms, ``uses`` the runs in which operands
and results of instructions had a memory, a type and a first partition on an engine.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from .refusals import CHIPS
from .spec import in_force

DATA = Path(__file__).with_name("evidence.json")
LANGUAGES = {False: "neuronxcc", True: "nki"}  # by whether it is today's


class Source(NamedTuple):
    """Where a mark comes from; `chip` and `release` are empty for pages."""

    place: str
    chip: str = ""
    release: str = ""

    def told(self) -> str:
        return f"{self.place} ({self.chip}, SDK {self.release})" if self.chip else self.place


class Use(NamedTuple):
    """An operand or a result of an instruction: `start` is its first partition."""

    language: str
    instruction: str
    engine: str
    role: str
    memory: str
    dtype: str
    start: str

    def __str__(self) -> str:
        where = f" from partition {self.start}" if self.start != "0" else ""
        named = "nki." if self.language == "nki" else ""
        one = f"{named}{self.instruction} on {self.engine}"
        return f"{one}: {self.role} in {self.memory}, {self.dtype}{where}"

    def differs(self, other: "Use") -> list[str]:
        """Names of fields in which another use is not this one, and what that one has."""
        pairs = zip(self._fields, self, other, strict=True)
        return [f"{name.replace('dtype', 'type')} {b}" for name, a, b in pairs if a != b]


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(DATA.read_text(encoding="utf-8"))


@functools.cache
def sources() -> dict[str, Source]:
    return {key: Source(*told) for key, told in _data()["sources"].items()}


def constructs() -> dict[str, list[str]]:
    """Status and key of the source of each name and form."""
    return _data()["constructs"]


@functools.cache
def uses(instruction: str, language: str) -> dict[Use, list[Source]]:
    """What an instruction of one language has been seen with, and a run for each chip."""
    return {
        Use(*key.split()): [sources()[one] for one in runs]
        for key, runs in _data()["uses"].items()
        if key.startswith(f"{language} {instruction} ")
    }


def seen(use: Use, runs: dict[Use, list[Source]]) -> str:
    """The run that shows a use, one on the chip in force before others; empty where none does."""
    chip = CHIPS[in_force().number]
    places = sorted(runs.get(use, []), key=lambda one: chip not in one.chip)
    if not places:
        return ""
    return places[0].told() + ("" if chip in places[0].chip else f"; none on a {chip}")


def nearest(use: Use, runs: dict[Use, list[Source]]) -> str:
    """The run of the same instruction that differs least, and in what; empty where none ran."""
    if not runs:
        return "no public run of the instruction"
    one = min(runs, key=lambda other: len(use.differs(other)))
    return f"nearest: {', '.join(use.differs(one))} in {runs[one][0].told()}"
