"""``learn [LESSON]``: twelve exercises from a vector add to decode attention."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from ..console import terminal
from ..console.arguments import positive
from ..environment import variable
from ..errors import UsageError
from ..lessons import LESSONS, TARGETS, TODAY, Lesson, pointers
from ..lessons.progress import PASSED, Workbook, usual_folder
from ..sandbox import limits
from . import kernels

HELP = "learn to write kernels: twelve exercises with hints and solutions"
NUMBERS = "one two three four five six seven eight nine ten eleven twelve"
MEMORY_BYTES = 4 * 2**30  # of a learner's kernel, beyond what the command has anyway


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "lesson", nargs="?", metavar="LESSON", help="number or name: show its task, check my answer"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--hint", action="store_true", help="one more hint, without a check")
    instead.add_argument("--solution", action="store_true", help="the solution, without a check")
    parser.add_argument(
        "--language",
        choices=tuple(TARGETS),
        default=TODAY,
        help="nki (SDK 2.29 and later, the default) or neuronxcc, the contest's (SDK 2.21 to 2.26)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where my copies are (default: nki_lessons or neuronxcc_lessons, or this folder if "
        "they are here)",
    )
    parser.add_argument(
        "--time-limit", type=positive, default=60, help="seconds that a check may take (60)"
    )
    kernels.declare_files(parser, json="write the states of all lessons, or what is asked of one")


def run(args: argparse.Namespace) -> int:
    """Show progress, or one lesson; 1 where its check fails."""
    folder = usual_folder(args.language) if args.folder is None else args.folder
    book = Workbook(folder, args.language)
    console = kernels.output(args)
    if args.lesson is None:
        for option in ("hint", "solution"):
            if getattr(args, option):
                raise UsageError(
                    f"--{option} without a lesson, expected one: neuron_cpu learn 1 --{option}."
                )
        kernels.write_json(args, console, _show_progress(console, book), "states")
        return 0
    lesson = _lesson(args.lesson)
    if args.solution:
        solution = lesson.track(args.language).solution.strip()
        console.print(solution)
        kernels.write_json(args, console, {"lesson": lesson.name, "solution": solution})
        print(f"\nFrom {terminal.here(str(lesson.page))}", file=sys.stderr)
        return 0
    if args.hint:
        most, hints = len(lesson.track(args.language).hints), book.next_hints(lesson)
        for number, text in enumerate(hints, 1):
            console.print(f"Hint {number} of {most}\n\n{text}\n")
        kernels.write_json(args, console, {"lesson": lesson.name, "hints": hints})
        return 0
    with variable(kernels.TARGET, TARGETS[args.language]):
        passed, content = _check(console, book, lesson, args.time_limit)
    kernels.write_json(args, console, content, "verdict")
    return 0 if passed else 1


def _lesson(text: str) -> Lesson:
    for lesson, word in zip(LESSONS, NUMBERS.split(), strict=True):
        if text in (lesson.name, str(lesson.number), word):
            return lesson
    near = [
        one.number
        for one in LESSONS
        if len(text) > 1 and text.lower() in f"{one.name} {one.teaches}".lower()
    ]
    near += [min(int(one) or 1, len(LESSONS)) for one in re.findall(r"\d+", text[:9])]
    mend = f"write {near[0]}" if near else "neuron_cpu learn lists them"
    raise UsageError(
        f"lesson {text[:40]!r} does not exist, expected a number from 1 to {len(LESSONS)} or a "
        f"name; {mend}."
    )


def _show_progress(console: Any, book: Workbook) -> list[dict[str, Any]]:
    """Print the state of each lesson, and return them for --json."""
    states = {lesson: book.state(lesson) for lesson in LESSONS}
    passed = sum(state == PASSED for state in states.values())
    title = f"{passed} of {len(LESSONS)} lessons passed, in {book.folder.resolve()}"
    table = terminal.table_of(">|lesson|what it teaches|state", title)
    for lesson, state in states.items():
        table.add_row(str(lesson.number), lesson.title, lesson.teaches, state)
    terminal.print_table(console, table, (), "what it teaches")
    _show_next(console, book)
    return [
        {"lesson": one.name, "number": one.number, "state": state} for one, state in states.items()
    ]


def _show_next(console: Any, book: Workbook) -> None:
    following = book.following()
    if following is None:
        console.print("All lessons passed. Next: your own kernels, neuron_cpu check --help")
    else:
        console.print(f"Next: {following.command(book.language)} ({following.title})")


def _check(
    console: Any, book: Workbook, lesson: Lesson, seconds: int
) -> tuple[bool, dict[str, Any]]:
    """Show the task, judge the learner's copy, record a pass; the verdict as --json has it."""
    from ..judge import exercises

    made = book.begin(lesson)
    path, command = book.path(lesson), lesson.command(book.language)
    asked = exercises.task(lesson, book.language)
    console.print(f"Lesson {lesson.number} of {len(LESSONS)}\n\n{asked.text}\n")
    console.print(f"Your {'new ' if made else ''}copy of the exercise: {path}\n")
    target = f"{path}:{lesson.name}"
    with limits.bounded(seconds, MEMORY_BYTES):
        kernel = kernels.load_kernel(target)
        with kernels.told_as_usage(kernel, target):
            found = exercises.check(kernel, asked)
    _show_verdicts(console, found.verdicts, lesson, asked.faster is not None)
    content = {
        "lesson": lesson.name,
        "passed": not found.missing,
        "missing": found.missing,
        "speedup": found.speedup,
        "cases": [one.to_json() for one in found.verdicts],
    }
    if found.missing:
        console.print(f"\nNot passed: {'; '.join(found.missing)}.")
        console.print(f"Edit your copy and run this again, or: {command} --hint")
        return False, content
    book.note_passed(lesson)
    times = "" if found.speedup is None else f", {exercises.compared(found.speedup)}"
    console.print(f"\nLesson {lesson.number} passed{times}.")
    console.print(f"A solution to compare with: {command} --solution")
    _show_next(console, book)
    return True, content


def _show_verdicts(console: Any, verdicts: list, lesson: Lesson, timed: bool) -> None:
    """Print a row a case and the first failure; where speed counts, also the bound."""
    from ..judge import exercises, tables
    from . import check

    terminal.print_table(console, tables.brief_table(verdicts), (), "arguments")
    doubtful = (one for one in verdicts if not one.correct or one.warnings)
    said = "\n".join(tables.sentences([next(doubtful, verdicts[-1])], timed))
    for line in (said, *pointers(said, besides=lesson)):
        console.print(line)
    if timed and any(one.speed for one in verdicts):
        console.print(check.estimate_line(exercises.SETTINGS))
