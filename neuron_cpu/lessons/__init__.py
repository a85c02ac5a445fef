"""Twelve exercises from a vector add to decode attention, and the messages that each explains.

A lesson is a page of ``course``: a description, the check's demands, and for each language of the
vendor a task, a kernel that fails, hints and a solution. Lessons are in the package, so
``neuron_cpu learn`` finds them wherever the package is installed; a learner edits a copy.
"""

import json
import linecache
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from . import pages

FOLDER = Path(__file__).resolve().parent / "course"
# language -> the chip that its lessons are judged for: the newest that published times cover
TARGETS = {"nki": "trn2", "neuronxcc": "trn1"}
TODAY = "nki"


class Track(NamedTuple):
    """A lesson in one language.

    Attributes:
        task: what is to be done, for people.
        exercise: the file that a learner begins with: task, a kernel that fails, the check.
        hints: each says more than the one before.
        solution: a file.
    """

    task: str
    exercise: str
    hints: tuple[str, ...]
    solution: str


class Lesson(NamedTuple):
    """One exercise.

    Attributes:
        name: of its page and of its kernel.
        teaches: in a few words.
        messages: identifiers of the errors and warnings that it explains.
        words: of other sentences that it explains: mends, Python's, and of wrong results.
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
    def page(self) -> Path:
        return FOLDER / f"{self.name}.md"

    def explains(self, text: str) -> bool:
        """Whether a message in ``text`` has an identifier in brackets, or words, of this lesson."""
        marks = *self.words, *(f"[{identifier}]" for identifier in self.messages)
        return any(mark in text for mark in marks)

    def track(self, language: str) -> Track:
        return _tracks(self.page)[language]

    def command(self, language: str) -> str:
        """The command line that opens it."""
        more = "" if language == TODAY else f" --language {language}"
        return f"neuron_cpu learn {self.number}{more}"

    def module(self, language: str) -> ModuleType:
        """The exercise, imported; the SDK's names have to be importable."""
        file = f"{self.page.with_suffix('')}.{language}.py"
        text = self.track(language).exercise
        return pages.module(f"{__name__}.{self.name}_{language}", text, file)


@lru_cache
def _tracks(page: Path) -> dict[str, Track]:
    """The lesson of a page, by language. Its sections: the description under the title, the check,
    and one for each language with parts exercise, hints and solution."""
    head, check, *languages = page.read_text(encoding="utf-8").split("\n## ")
    _, check = pages.text_and_code(check)
    found = {}
    for section in languages:
        name, _, rest = section.partition("\n")
        said, exercise, hints, solution = re.split(r"\n### \w+\n", rest)
        task = f"{head.removeprefix('# ').strip()}\n\n{said.strip()}"
        _, kernel = pages.text_and_code(exercise)
        found[name.removeprefix("In ").split(".")[0]] = Track(
            task,
            f'"""{task}\n"""\n\n{kernel}\n\n{check}',
            tuple(hints.strip().split("\n\n")),
            pages.as_file(solution),
        )
    return found


_TABLE = json.loads((FOLDER.parent / "lessons.json").read_text(encoding="utf-8"))
LESSONS = tuple(
    Lesson(one["name"], one["teaches"], tuple(one["messages"]), tuple(one.get("words", ())))
    for one in _TABLE["lessons"]
)
_PLACES = re.compile(r"([^\s()]+):\d+\b")
_WRITTEN = re.compile(r"written otherwise, .*(\n +.*)*")  # a kernel that the judge prints
_IMPORTS = re.compile(r"\s*(?:import|from)\s+(neuronxcc|nki)\b")


def language_of(text: str) -> str:
    """The language of the file whose line a message names; today's where it names none."""
    for place in _PLACES.findall(text):
        linecache.checkcache(place)
        imports = map(_IMPORTS.match, linecache.getlines(place))
        if first := next(filter(None, imports), None):
            return first[1]
    return TODAY


def pointers(text: str, besides: Lesson | None = None) -> list[str]:
    """A line for each lesson, one apart, that explains a message in ``text``."""
    text = _WRITTEN.sub("", text)
    about = [lesson for lesson in LESSONS if lesson is not besides and lesson.explains(text)]
    language = language_of(text) if about else TODAY
    return [
        f"Lesson {lesson.number} ({lesson.title}) is about this: {lesson.command(language)}"
        for lesson in about
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
