"""Twelve exercises from a vector add to decode attention, and the messages that each explains.

A lesson is a folder of ``course``: ``exercise.py`` (task, a kernel that fails, the check's
demands), ``hints.txt`` and ``solution.py``. Lessons are in the package, so ``neuron_cpu learn``
finds them wherever the package is installed; a learner edits a copy.
"""

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent / "course"


class Lesson(NamedTuple):
    """One exercise.

    Attributes:
        name: of its folder and of its kernel.
        teaches: in a few words.
        messages: identifiers of the errors and warnings that it is about.
        words: of sentences without an identifier that it is about: Python's, and of wrong results.
    """

    name: str
    teaches: str
    messages: tuple[str, ...]
    words: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        return LESSONS.index(self) + 1

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")

    @property
    def exercise(self) -> Path:
        return FOLDER / self.name / "exercise.py"

    @property
    def solution(self) -> Path:
        return FOLDER / self.name / "solution.py"

    @property
    def hints(self) -> list[str]:
        """Each says more than the one before."""
        text = (FOLDER / self.name / "hints.txt").read_text(encoding="utf-8")
        return text.strip().split("\n\n")


_TABLE = json.loads((FOLDER.parent / "lessons.json").read_text(encoding="utf-8"))
LESSONS = tuple(
    Lesson(one["name"], one["teaches"], tuple(one["messages"]), tuple(one.get("words", ())))
    for one in _TABLE["lessons"]
)
WITHOUT = frozenset(_TABLE["elsewhere"])
ABOUT = {message: lesson for lesson in LESSONS for message in lesson.messages}
_IDENTIFIERS = re.compile(r"\[((?:err|sim)_\w+)\]")


def pointers(text: str, besides: Lesson | None = None) -> list[str]:
    """A line for each lesson, one apart, that a message in ``text`` is about.

    Messages of kernels end in their identifier in brackets; others are known by their words.
    """
    found = [ABOUT.get(identifier) for identifier in _IDENTIFIERS.findall(text)]
    told = {words: one for one in LESSONS for words in one.words if words in text}
    # The words that say most: "use nl.transpose" is no matter of any "use nl.".
    found += [
        told[words] for words in told if not any(words in more for more in told.keys() - {words})
    ]
    about = dict.fromkeys(found)
    if "do not broadcast the partition axis" in text:  # the same identifier as a transpose's
        about.pop(ABOUT["err_num_partition_mismatch"], None)
    return [
        f"Lesson {lesson.number} ({lesson.title}) is about this: neuron_cpu learn {lesson.number}"
        for lesson in about
        if lesson not in (None, besides)
    ]


def with_pointers(text: str) -> str:
    """The text, and its `pointers` below."""
    return "\n".join([text.rstrip("\n"), *pointers(text)])


@contextmanager
def pointed_out() -> Iterator[None]:
    """Inside the block warnings of kernels are followed by their `pointers`."""
    usual = warnings.formatwarning

    def pointing(*arguments: Any, **keywords: Any) -> str:
        return with_pointers(usual(*arguments, **keywords)) + "\n"

    warnings.formatwarning = pointing
    try:
        yield
    finally:
        warnings.formatwarning = usual
