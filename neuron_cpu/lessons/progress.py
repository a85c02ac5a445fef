"""A learner's folder: copies of exercises, and a file that says which of them have passed."""

import json
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import write_text_atomically
from . import LESSONS, TODAY, Lesson, language_of

FILE = ".progress.json"
PASSED, BEGUN, NOT_BEGUN = "passed", "begun", "not begun"


class Workbook:
    """A learner's copies of the exercises and the state of each.

    Args:
        folder: where they are; it need not exist yet.
        language: of the kernels in it.

    Raises:
        UsageError: its progress cannot be read.
    """

    def __init__(self, folder: Path, language: str = TODAY) -> None:
        self.folder, self.language = folder, language
        self._notes = self._read()

    def path(self, lesson: Lesson) -> Path:
        """The learner's copy, which may not be there yet."""
        return self.folder / file_name(lesson)

    def begin(self, lesson: Lesson) -> bool:
        """Copy the exercise, unless there is a copy; whether it was made.

        Raises:
            UsageError: the copy is in another language.
        """
        path = self.path(lesson)
        if path.exists():
            found = language_of(f"{path}:1")
            if found != self.language:
                raise UsageError(
                    f"{path} is a kernel of {found}, expected one of {self.language}; run "
                    f"{lesson.command(found)}, or name another --folder."
                )
            return False
        write_text_atomically(path, lesson.track(self.language).exercise)
        return True

    def state(self, lesson: Lesson) -> str:
        if not self.path(lesson).is_file():
            return NOT_BEGUN
        return PASSED if self._notes.get(lesson.name, {}).get("passed") else BEGUN

    def note_passed(self, lesson: Lesson) -> None:
        self._note(lesson, "passed", True)

    def next_hints(self, lesson: Lesson) -> list[str]:
        """The hints seen so far and one more."""
        seen = self._notes.get(lesson.name, {}).get("hints", 0) + 1
        shown = list(lesson.track(self.language).hints[:seen])
        self._note(lesson, "hints", len(shown))
        return shown

    def following(self) -> Lesson | None:
        """The first lesson that has not passed."""
        return next((one for one in LESSONS if self.state(one) != PASSED), None)

    def _note(self, lesson: Lesson, key: str, value: Any) -> None:
        self._notes.setdefault(lesson.name, {})[key] = value
        write_text_atomically(self.folder / FILE, json.dumps(self._notes, indent=1))

    def _read(self) -> dict[str, dict[str, Any]]:
        path = self.folder / FILE
        if not path.is_file():
            return {}
        try:
            notes = json.loads(path.read_text(encoding="utf-8"))
            seen = [one.get("hints", 0) for one in notes.values()]
        except (ValueError, AttributeError, RecursionError):
            seen = [None]
        if not all(isinstance(number, int) for number in seen):
            raise UsageError(
                f"{path} is damaged, expected the progress that neuron_cpu learn wrote; delete it "
                "and run the lessons that had passed once more."
            )
        return notes


def file_name(lesson: Lesson) -> str:
    return f"lesson{lesson.number:02}_{lesson.name}.py"


def usual_folder(language: str) -> Path:
    """The working folder if it holds lessons, or a folder below it."""
    here = Path()
    if any((here / file_name(one)).is_file() for one in LESSONS):
        return here
    return here / f"{language}_lessons"
