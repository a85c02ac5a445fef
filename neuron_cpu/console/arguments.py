"""Values of a command line: types for argparse, whose errors name the expected form."""

import argparse
import contextlib
import difflib
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LARGEST = 2**31 - 1  # of a whole number that may become a size of a tensor


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

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The arguments; ends with what is wrong with them."""
        known, unknown = self.parse_known_args(args, namespace)
        self.refuse(unknown, sys.argv[1:] if args is None else args)
        return known

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """As the base class does it, without the options whose values are wrong."""
        words = list(sys.argv[1:] if args is None else args)
        while True:
            try:
                return super().parse_known_args(words, namespace)
            except argparse.ArgumentError as error:
                name = str(error.argument_name).rpartition("/")[2]
                at = [i for i, word in enumerate(words) if word.partition("=")[0] == name]
                if not at:
                    self.error(str(error))
                action = self._option_string_actions[name]
                action.required = False  # it is there
                rest = words[at[-1] + 1 :]
                lacks = re.fullmatch("expected .* arguments?", error.message)
                more = 0 if lacks or "=" in words[at[-1]] else 1
                if action.nargs == "+":
                    more = next((i for i, w in enumerate(rest) if w.startswith("-")), len(rest))
                given = "" if lacks else [words[at[-1]].partition("=")[2], *rest[:more]][-1]
                self.told.append(f"argument {name}: {self._mended(name, error.message, given)}")
                words[at[-1] :] = rest[more:]

    def refuse(self, unknown: Sequence[str], line: Sequence[str]) -> None:
        """End with what is wrong with values, and for words that nothing takes what is meant."""
        rest = list(unknown)
        while rest:
            word = rest.pop(0)
            many = next((i for i, one in enumerate(rest) if one.startswith("-")), len(rest))
            if not word.startswith("-"):
                mend = self.place([word, *rest[:many]], line)
                self.told.append(f"{word!r} is one argument too many; {mend}")
                rest = rest[many:]
                continue
            name, equals, value = word.partition("=")
            if not equals:
                value = "".join(line[line.index(word) + 1 :][:1])
                value = "" if value.startswith("-") else value
                rest = rest[1:] if rest[:1] == [value] else rest
            self.told.append(f"there is no {name}; {self.instead(name, value, line)}")
        if self.told:
            self.error(self.told.pop())

    def sentences(self, last: str) -> str:
        """What is told, and this behind it."""
        first, *more = *self.told, last
        return ". ".join([first, *(one[0].upper() + one[1:] for one in more)])

    def place(self, words: Sequence[str], line: Sequence[str]) -> str:
        """Where words without an option belong."""
        raise NotImplementedError

    def instead(self, name: str, value: str, line: Sequence[str]) -> str:
        """What to write for an option that there is not."""
        word = name.strip("-").replace("_", "-")
        near = [one for one, words in self.meant.items() if word in words.split()]
        near = [
            one for one in near if one[0] != "-" or one.split()[0] in self._option_string_actions
        ]
        near = near or self._near(name.replace("_", "-"), value)
        return f"write {near[0]}" if near else "leave it out"

    def _near(self, name: str, value: str) -> list[str]:
        """An option that begins or ends so, or has nearly these letters; among those one that takes
        the value."""
        actions = self._option_string_actions
        takes = [n for n, action in actions.items() if value in (action.choices or ())]
        if close := difflib.get_close_matches(name, takes, 1, 0.5):
            return close
        no = name.startswith("--no-")
        names = [n for n in actions if n.startswith("--no-" if no else "--")]
        names = [n for n in names if n.startswith("--no-") == no]
        end = name[4:] if no else name[1:]
        same = [n for n in names if f"{n}-".startswith(f"{name}-") or n.endswith(end)]
        alike = [n for n in names if no or n[2:3] == name[2:3]]
        return same[:1] or difflib.get_close_matches(name, alike, 1, 0.7)

    def _mended(self, name: str, said: str, given: str) -> str:
        """argparse's message, with the value that an option lacks or that is nearest to a wrong
        one."""
        action = self._option_string_actions[name]
        choices = list(map(str, action.choices or ()))
        if not given:
            return f"{said}; write {name} {action.metavar or '|'.join(choices) or 'VALUE'}"
        if action.nargs == "+" and "," in given:
            return f"{said.partition('; ')[0]}; write {name} {given.replace(',', ' ')}"
        if not choices:
            return said
        words = {one.partition(" ")[2]: words for one, words in self.meant.items() if name in one}
        near = [one for one in words if given in words[one].split()]
        near += [one for one in choices if one in given or given in one]
        near += difflib.get_close_matches(given.lower(), choices, 1, 0.5)
        if near:
            return f"{said}; write {name} {near[0]}"
        usual = f"leave it out for {action.default}: " * (action.default in choices)
        return f"{said}; {usual}{action.help}"


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
