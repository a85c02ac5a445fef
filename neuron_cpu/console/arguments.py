"""Values of a command line: types for argparse, whose errors name the expected form."""

import argparse
import contextlib
import difflib
import itertools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LARGEST = 2**31 - 1  # of a whole number that may become a size of a tensor


def table(text: str) -> dict[str, str]:
    """Lines of NAME: WORDS."""
    return dict(line.split(": ", 1) for line in text.strip().splitlines())


def shown(text: str) -> str:
    """A user's text in few characters."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _number(
    kind: type, expected: str, fits: Callable[[Any], bool], example: str
) -> Callable[[str], Any]:
    """The type of an argument that is a number which `fits`, as `example` does."""

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            value = kind(text)
            return value if fits(value) else None

    def number(text: str) -> Any:
        value = read(text)
        if value is not None:
            return value
        parts = re.findall(r"\d+\.?\d*(?:e[-+]?\d+)?", re.sub(r"(?i)(\d)k\b", r"\g<1>000", text))
        parts += [f"{float(part) / 100:g}" for part in parts if kind is float]  # of a percentage
        near = [part for part in parts if read(part) is not None and (part + "%" not in text)]
        raise argparse.ArgumentTypeError(
            f"expected {expected}, got {shown(text)}; write one such as {[*near, example][0]}"
        )

    return number


# small enough for a tensor's size
positive = _number(int, f"a whole number from 1 to {LARGEST}", lambda n: 1 <= n <= LARGEST, "8")
finite = _number(float, "a finite number", math.isfinite, "1.0")
at_least_zero = _number(float, "a finite number of at least 0", lambda x: 0 <= x < math.inf, "0.5")
above_zero = _number(float, "a finite number above 0", lambda x: 0 < x < math.inf, "0.5")
share = _number(float, "a number above 0 and at most 1", lambda x: 0 < x <= 1, "0.5")
whole = _number(int, "a whole number", lambda n: True, "0")
# for torch.manual_seed, of 64 bits
seed = _number(int, "a whole number from 0 to 2^64 - 1", lambda n: 0 <= n < 2**64, "0")


class Parser(argparse.ArgumentParser):
    """A parser that tells in one run all that is wrong with a command line, and what is meant.

    Attributes:
        meant: what to write, with the words that others have for it.
        told: what is wrong with values, a sentence each.
    """

    meant: Mapping[str, str] = {}

    def __init__(self, *names: Any, **more: Any) -> None:
        super().__init__(*names, **more)
        self.exit_on_error, self.told = False, list[str]()
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)")  # -1x512 is a value, too

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The arguments; ends with what is wrong with them."""
        known, unknown = self.parse_known_args(args, namespace)
        self.refuse(unknown, sys.argv[1:] if args is None else args)
        return known

    def parse_known_args(self, *args: Any) -> Any:  # type: ignore[override]
        """As the base class does it; an option with a wrong value takes any, once that is told, and
        what lacks is told with the rest."""
        needed = [one for one in self._actions if one.required and one.nargs != argparse.PARSER]
        for one in needed:
            one.required = False
        while True:
            try:
                known, unknown = super().parse_known_args(*args)
                named = [one for one in needed if getattr(known, one.dest) is None]
                lacking = ["".join(one.option_strings) or str(one.metavar) for one in named]
                if lacking and f"argument {lacking[0]}: " not in "".join(self.told):
                    self.told.append(self.lacking(lacking))
                return known, unknown
            except argparse.ArgumentError as error:
                flag = str(error.argument_name).partition("/")[0]
                action = self._option_string_actions.get(flag)
                both = "not allowed" in error.message  # two that exclude each other
                if action is None or both or f"argument {flag}: " in "".join(self.told):
                    self.error(f"{error}{'; leave one of them out' * both}")
                self.told.append(f"argument {flag}: {self._mended(flag, action, error.message)}")
                action.type = action.choices = None
                action.nargs = "*" if action.nargs == "+" else "?"

    def refuse(self, unknown: Sequence[str], line: Sequence[str]) -> None:
        """End with what is wrong with values, and for words that nothing takes what is meant."""
        rest = list(unknown)
        while rest:
            word, *rest = rest
            values = [*itertools.takewhile(lambda one: one[:1] != "-", rest)]
            rest, options = rest[len(values) :], self._option_string_actions
            at = [i for i, one in enumerate(line) if one == word]
            before = line[: next((i for i in at if line[i - 1] not in options), at[0])]
            name, equals, value = word.partition("=")
            if name.startswith("-"):
                values = [value] if equals else values
                self.told.append(f"there is no {name}; {self.instead(name, values)}")
                continue
            mend = self.place([word, *values], before)
            if before and before[-1] in options and ".py" not in word:
                mend = f"{before[-1]} takes no value: leave {word} out"
            self.told.append(f"{word!r} is one argument too many; {mend}")
        if self.told:
            self.error(self.told.pop())

    def lacking(self, names: Sequence[str]) -> str:
        """What a command line without these arguments is told."""
        return f"the following arguments are required: {', '.join(names)}"

    def sentences(self, last: str) -> str:
        """What is told, and this behind it."""
        first, *more = *self.told, last
        return ". ".join([first, *(one[0].upper() + one[1:] for one in more)])

    def place(self, words: Sequence[str], before: Sequence[str]) -> str:
        """Where words without an option belong, by those before them."""
        raise NotImplementedError

    def instead(self, name: str, values: Sequence[str]) -> str:
        """What to write for an option that there is not: one of this meaning, that begins or ends
        so, or has nearly these letters; among those one that takes the value."""
        actions, word = self._option_string_actions, name.strip("-").replace("_", "-")
        no, name = word.startswith("no-"), f"--{word}"
        takes = [one for one, action in actions.items() if {*values} & {*(action.choices or ())}]
        near = difflib.get_close_matches(name, takes, 1, 0.5)
        near += [
            one
            for one, words in self.meant.items()
            if word in words.split() and (one[0] != "-" or one.split()[0] in actions)
        ]
        names = [one for one in actions if one.startswith("--no-") == no]
        end = f"-{word.removeprefix('no-')}"
        if word[2:]:
            near += [one for one in names if one.startswith(name) or one.endswith(end)]
        alike = [one for one in names if no or one[2:3] == word[:1]]
        near += difflib.get_close_matches(name, alike, 1, 0.7)
        return f"write {near[0]}" if near else "leave it out"

    def _mended(self, flag: str, action: argparse.Action, said: str) -> str:
        """argparse's message, with the value that an option lacks or that is nearest to a wrong
        one."""
        choices = list(map(str, action.choices or ()))
        found = re.search(r"(?:choice:|got) '(.*?)'", said)
        given = found[1] if found else ""
        if "," in given and (action.nargs == "+" or isinstance(action, argparse._AppendAction)):
            between = " " if action.nargs else f" {flag} "
            return f"{said.partition('; ')[0]}; write {flag} {given.replace(',', between)}"
        span = re.fullmatch(r"(\d+)(?:-|:|\.\.)(\d+)", given)
        if span and action.nargs == "+":
            every = range(int(span[1]), int(span[2]) + 1)[:99]
            return f"{said.partition('; ')[0]}; write {flag} {' '.join(map(str, every))}"
        if "; " in said or found and not choices:
            return said
        if not found:
            value = action.metavar or "|".join(choices)
            return f"{said}; write {flag}{f' {value}' if value and action.nargs != 0 else ''}"
        words = {one.partition(" ")[2]: words for one, words in self.meant.items() if flag in one}
        near = [one for one in words if given in words[one].split()]
        word = given.lower().replace("-", "_")
        near += [one for one in choices if one == word]
        near += [one for one in choices if one in given or given in one]
        near += difflib.get_close_matches(word, choices, 1, 0.5)
        if near:
            return f"{said}; write {flag} {near[0]}"
        usual = f"leave it out for {action.default}: " * (action.default in choices)
        return f"{said}; {usual}{action.help or 'write one of these'}"


def path(text: str) -> Path:
    """A path with `~` resolved."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"expected a path, got {text!r}")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(
            f"expected a path, got {shown(text)}: {str(error).rstrip('.')}"
        ) from error
