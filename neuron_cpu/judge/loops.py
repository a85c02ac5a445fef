"""Lines that repeat become a loop, such as those of the steps of a recurrence."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

MOST, LEAST = 24, 4  # lines of a turn, and turns
WORD = re.compile(r"[A-Za-z_]\w*|\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def rolled(lines: Sequence[str]) -> list[str]:
    """The lines with the longest part that repeats as a loop, again until there is none."""
    names = _given(lines)

    def form(found: re.Match[str]) -> str:
        return "#" if found[0][0].isdigit() or found[0] in names else found[0]

    forms, ways = [WORD.sub(form, one) for one in lines], []
    for size in range(1, min(MOST, len(lines) // LEAST) + 1):
        first = 0
        for at in range(len(lines) - size + 1):
            if at + size == len(lines) or forms[at] != forms[at + size]:
                ways.append((at + size - first, size, first))
                first = at + 1
    for length, size, first in sorted(ways, key=lambda one: (-one[0], one[1])):
        for start in range(first, first + min(size, length - LEAST * size + 1)):
            turns = (first + length - start) // size
            if made := _loop([*lines], start, size, turns, names):
                return rolled(made)
    return [*lines]


def _given(lines: Sequence[str]) -> dict[str, int]:
    """Names that lines give, and in which line."""
    pairs = [(at, one.split()) for at, one in enumerate(lines)]
    return {some[0]: at for at, some in pairs if some[1:2] == ["="]}


def _loop(lines: list[str], start: int, size: int, turns: int, names: dict[str, int]) -> list[str]:
    """All lines with turns of `size` lines as a loop, none where the turns differ.

    What a turn leaves to the next one begins as what the first turn has in its place; otherwise
    the first turn stays before the loop.
    """
    blocks = [lines[start + n * size :][:size] for n in range(turns)]
    words = [[word for one in block for word in WORD.findall(one)] for block in blocks]
    given = [_given(block) for block in blocks]

    def roles(turn: int) -> list[tuple[str, Any]]:
        """What words are: given in a line of this turn or of the last one, numbers, or others."""
        before = given[turn - 1] if turn else {}
        return [
            ("own", given[turn][one]) if one in given[turn]
            else ("last", before[one]) if one in before
            else ("number", 0) if one[0].isdigit() else ("", one)
            for one in words[turn]
        ]  # fmt: skip

    asked = roles(1)
    numbers = [np.array([float(one) if one[0].isdigit() else 0.0 for one in some]) for some in words
               if len(some) == len(asked)]  # fmt: skip
    if len(numbers) < turns:
        return []
    step, count = numbers[2] - numbers[1], 2
    while count < turns and roles(count) == asked:
        if not np.array_equal(numbers[count], numbers[1] + (count - 1) * step):
            break
        count += 1
    begun: dict[int, str] = {}  # what the first turn has of the one before it
    whole = np.array_equal(numbers[0], numbers[1] - step)
    for (kind, line), own, word in zip(asked, roles(0), words[0]):
        if kind == "last" and word in names and own == ("", word):
            whole = whole and begun.setdefault(line, word) == word
        else:
            whole = whole and own == (kind, line)
    end = start + count * size
    later = [word for one in lines[end:] for word in WORD.findall(one)]
    within = [word for some in words[1:] for word in some]
    whole = whole and not {*begun.values()} & {*later, *within}
    called = {at: begun.get(at, name) if whole else name for name, at in given[0].items()}
    first = 0 if whole else 1
    places = [at for at, one in enumerate(blocks[1]) for _ in WORD.findall(one)]
    late = any(kind == "last" and line < at for (kind, line), at in zip(asked, places))
    if late or count - first < LEAST or any({*one} & {*later} for one in given[: count - 1]):
        return []
    known = {word for one in lines for word in WORD.findall(one)}
    loop = next(one for one in ("i_step", "i_turn", "i_again", "i_more") if one not in known)
    some = iter([
        called[line] if kind in ("own", "last") else _number(word, base, by, loop)
        for (kind, line), word, base, by in zip(asked, words[1], numbers[1] - step, step)
    ])  # fmt: skip
    body = ["    " + WORD.sub(lambda _: next(some), one) for one in blocks[1]]
    indent = blocks[1][0][: -len(blocks[1][0].lstrip())]
    head = f"{indent}for {loop} in range({first}, {count}):".replace("range(0, ", "range(")
    last = {name: called[at] for name, at in given[count - 1].items()}
    after = [WORD.sub(lambda found: last.get(found[0], found[0]), one) for one in lines[end:]]
    return [*lines[: start + first * size], head, *body, *after]


def _number(word: str, base: float, by: float, loop: str) -> str:
    """A word, or a number that grows with a loop."""
    if not by:
        return word
    text = f"{loop} * {by:g}" if by != 1 else loop
    return text + (f" + {base:g}" if base > 0 else f" - {-base:g}" if base else "")
