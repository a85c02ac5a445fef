"""Text of an answer while its tokens come: nothing is ever taken back, stop strings never shown."""

from collections.abc import Sequence
from typing import Any

from harness.streaming import RowText


class AnswerText:
    """Turns tokens into text that ends before the first of `stops`."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._row = RowText(tokenizer)
        self._stops = list(stops)
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain with this token."""
        return self._until_stop(self._row.add(token))

    def rest(self) -> str:
        """Return the text held back, when no further token comes."""
        text = self._until_stop(self._row.rest())
        if self.stopped:
            return text
        held, self._held = self._held, ""
        return text + held

    def _until_stop(self, text: str) -> str:
        text, self._held = self._held + text, ""
        found = [place for place in map(text.find, self._stops) if place >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many of the last letters of `text` a stop string may begin with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
